"""Imported once by the server that forks the ranks: what they all need, with every kernel loaded."""

from __future__ import annotations

import torch
import torch._dynamo  # DDP imports it when it is built, which takes a second

import tests.process.models  # noqa: F401
import thinwire.train.ddp
import thinwire.train.gossip  # noqa: F401
from thinwire.compress.base import Compensated, Shortlist, add_entries, compensate
from thinwire.compress.coding import Bitmap, Coding, EliasFano
from thinwire.compress.topk import ThresholdTopK, TopK

torch.set_num_threads(1)
_x, _shortlist = torch.randn(1000), Shortlist(torch.float32)
for _ in range(3):
    compensate(torch.zeros(1000), torch.randn(1000), 1.0, _x, 0, _shortlist)
    TopK().take(Compensated(x=_x, energy=1.0, finite=True, shortlist=_shortlist), 0.1, 0)
_chosen = ThresholdTopK().take(Compensated.of(_x), 0.1, 0)
add_entries(_x, _chosen, 1.0)
_coding, _four_bits = Coding(1000, 100, torch.float32), Coding(1000, 100, torch.float32, "log4")
_message = torch.empty(_four_bits.nbytes, dtype=torch.uint8)
_four_bits.encode(_chosen, _message)
_four_bits.decode(_message)
for _code in (Bitmap(), EliasFano()):
    _out = torch.empty(_code.nbytes(1000, 100), dtype=torch.uint8)
    _code.encode(_chosen.indices, 1000, _out)
    _coding.decode_indices(_out) if _code.name == _coding.code.name else _code.decode(_out, 1000, 100)
