"""Transformers' Trainer with thinwire below it: a small, new GPT-2 learns the bytes of Python's own argparse.

torchrun --nproc-per-node 2 examples/transformers_trainer.py
torchrun --nproc-per-node 2 examples/transformers_trainer.py --steps 80 --resume runs/transformers/checkpoint-40
"""

import argparse
import functools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a process group: examples/ddp.py says why
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import thinwire
from thinwire.integrations.transformers import ThinwireCallback


def windows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """The text cut into pieces; a token is a byte."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return [{"input_ids": piece, "labels": piece} for piece in text.split(length) if len(piece) == length]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--exchange", default="adaptive", help="adaptive, or one for good: star-topk, dense, ...")
    parser.add_argument("--out", default="runs/transformers", help="where checkpoints go")
    parser.add_argument("--resume", help="a checkpoint's folder")
    train(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()  # after the model has gone: see examples/ddp.py


def train(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        model=GPT2LMHeadModel(small),
        args=TrainingArguments(
            output_dir=arguments.out,
            max_steps=arguments.steps,
            save_steps=arguments.save_every,
            logging_steps=10,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            resume_from_checkpoint=arguments.resume,
            report_to="none",
        ),
        train_dataset=windows(),
    )
    callback = ThinwireCallback(trainer, attach=functools.partial(thinwire.attach, exchange=arguments.exchange))
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=arguments.resume)
    if trainer.is_world_process_zero():
        callback.comm.explain()


if __name__ == "__main__":
    main()
