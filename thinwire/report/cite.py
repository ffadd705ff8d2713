"""BibTeX of the methods that a run used."""

from __future__ import annotations

from collections.abc import Iterable

from thinwire.report.runs import Comparison, Run

_ENTRIES = {
    "tyagi2023flexible": """@inproceedings{tyagi2023flexible,
  author    = {Tyagi, Sahil and Swany, Martin},
  title     = {Flexible Communication for Optimal Distributed Learning over Unpredictable Networks},
  booktitle = {IEEE International Conference on Big Data},
  pages     = {925--935},
  year      = {2023},
  eprint    = {2312.02493},
  archiveprefix = {arXiv}
}""",
    "chen2020scalecom": """@inproceedings{chen2020scalecom,
  author    = {Chen, Chia-Yu and Ni, Jiamin and Lu, Songtao and Cui, Xiaodong and Chen, Pin-Yu and others},
  title     = {{ScaleCom}: Scalable Sparsified Gradient Compression for Communication-Efficient Distributed Training},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2020}
}""",
    "aji2017sparse": """@inproceedings{aji2017sparse,
  author    = {Aji, Alham Fikri and Heafield, Kenneth},
  title     = {Sparse Communication for Distributed Gradient Descent},
  booktitle = {Conference on Empirical Methods in Natural Language Processing},
  year      = {2017}
}""",
    "stich2018sparsified": """@inproceedings{stich2018sparsified,
  author    = {Stich, Sebastian U. and Cordonnier, Jean-Baptiste and Jaggi, Martin},
  title     = {Sparsified {SGD} with Memory},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2018}
}""",
    "karimireddy2019error": """@inproceedings{karimireddy2019error,
  author    = {Karimireddy, Sai Praneeth and Rebjock, Quentin and Stich, Sebastian U. and Jaggi, Martin},
  title     = {Error Feedback Fixes {SignSGD} and other Gradient Compression Schemes},
  booktitle = {International Conference on Machine Learning},
  year      = {2019}
}""",
    "shi2021towards": """@inproceedings{shi2021towards,
  author    = {Shi, Shaohuai and Zhou, Xianhao and Song, Shutao and Wang, Xingyao and Zhu, Zilin and others},
  title     = {Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters},
  booktitle = {Machine Learning and Systems},
  year      = {2021}
}""",
    "vogels2019powersgd": """@inproceedings{vogels2019powersgd,
  author    = {Vogels, Thijs and Karimireddy, Sai Praneeth and Jaggi, Martin},
  title     = {{PowerSGD}: Practical Low-Rank Gradient Compression for Distributed Optimization},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2019}
}""",
    "lian2017decentralized": """@inproceedings{lian2017decentralized,
  author    = {Lian, Xiangru and Zhang, Ce and Zhang, Huan and Hsieh, Cho-Jui and Zhang, Wei and Liu, Ji},
  title     = {Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for Decentralized Parallel
               Stochastic Gradient Descent},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2017}
}""",
    "tang2018communication": """@inproceedings{tang2018communication,
  author    = {Tang, Hanlin and Gan, Shaoduo and Zhang, Ce and Zhang, Tong and Liu, Ji},
  title     = {Communication Compression for Decentralized Training},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2018},
  eprint    = {1803.06443},
  archiveprefix = {arXiv}
}""",
    "koloskova2019decentralized": """@inproceedings{koloskova2019decentralized,
  author    = {Koloskova, Anastasia and Stich, Sebastian U. and Jaggi, Martin},
  title     = {Decentralized Stochastic Optimization and Gossip Algorithms with Compressed Communication},
  booktitle = {International Conference on Machine Learning},
  year      = {2019}
}""",
    "koloskova2020decentralized": """@inproceedings{koloskova2020decentralized,
  author    = {Koloskova, Anastasia and Lin, Tao and Stich, Sebastian U. and Jaggi, Martin},
  title     = {Decentralized Deep Learning with Arbitrary Communication Compression},
  booktitle = {International Conference on Learning Representations},
  year      = {2020},
  eprint    = {1907.09356},
  archiveprefix = {arXiv}
}""",
    "tang2019deepsqueeze": """@misc{tang2019deepsqueeze,
  author    = {Tang, Hanlin and Lian, Xiangru and Qiu, Shuang and Yuan, Lei and Zhang, Ce and Zhang, Tong and Liu, Ji},
  title     = {{DeepSqueeze}: Decentralization Meets Error-Compensated Compression},
  year      = {2019},
  eprint    = {1907.07346},
  archiveprefix = {arXiv}
}""",
    "aketi2024adagossip": """@misc{aketi2024adagossip,
  author    = {Aketi, Sai Aparna and Hashemi, Abolfazl and Roy, Kaushik},
  title     = {{AdaGossip}: Adaptive Consensus Step-size for Decentralized Deep Learning with Communication
               Compression},
  year      = {2024},
  eprint    = {2404.05919},
  archiveprefix = {arXiv}
}""",
    "li2020pytorch": """@article{li2020pytorch,
  author    = {Li, Shen and Zhao, Yanli and Varma, Rohan and Salpekar, Omkar and Noordhuis, Pieter and others},
  title     = {{PyTorch} Distributed: Experiences on Accelerating Data Parallel Training},
  journal   = {Proceedings of the VLDB Endowment},
  volume    = {13},
  number    = {12},
  year      = {2020}
}""",
}
_SOFTWARE = """@software{{thinwire,
  author    = {{{{The thinwire authors}}}},
  title     = {{thinwire: training {{PyTorch}} models over thin, unpredictable wires}},
  version   = {{{version}}}
}}"""
_TOP_K = ("aji2017sparse", "stich2018sparsified", "karimireddy2019error")
_AR_TOP_K = ("tyagi2023flexible", "chen2020scalecom", *_TOP_K)
_METHODS = {
    "adaptive": ("tyagi2023flexible",),
    "topk-allgather": _TOP_K,
    "layerwise-topk": _TOP_K,
    "ms-topk": ("shi2021towards", *_TOP_K),
    "star-topk": _AR_TOP_K,
    "var-topk": ("tyagi2023flexible", *_TOP_K),
    "ddp": ("li2020pytorch",),
    "ddp-fp16": ("li2020pytorch",),
    "ddp-powersgd": ("vogels2019powersgd", "li2020pytorch"),
    "powersgd": ("vogels2019powersgd",),
    "dpsgd": ("lian2017decentralized",),
    "naive": ("tang2018communication",),
    "dcd": ("tang2018communication",),
    "ecd": ("tang2018communication",),
    "choco": ("koloskova2019decentralized", "koloskova2020decentralized"),
    "adagossip": ("aketi2024adagossip", "koloskova2019decentralized", "koloskova2020decentralized"),
    "deepsqueeze": ("tang2019deepsqueeze",),
}


def bibtex(loaded: Run | Comparison) -> str:
    """The entries of all methods that ran, in the order in which they are first used, and of thinwire itself."""
    runs = loaded.runs if isinstance(loaded, Comparison) else [loaded]
    used = dict.fromkeys(method for run in runs for method in methods(run))
    keys = dict.fromkeys(key for method in used for key in _METHODS.get(method, ()))
    version = next((run.facts.get("versions", {}).get("thinwire", "") for run in runs), "")
    return "\n\n".join([_SOFTWARE.format(version=_plain(version)), *(_ENTRIES[key] for key in keys)])


def methods(run: Run) -> Iterable[str]:
    """What ran, by the names of methods and exchanges: what was only considered is not cited."""
    if run.controller is not None or run.method == "adaptive":
        yield "adaptive"
    name = run.method.partition("@")[0].partition(":")[0]
    yield name
    yield from dict.fromkeys(plan.exchange for plan in run.plans)


def _plain(version: str) -> str:
    """A version has no business with braces, and BibTeX would trip over them."""
    return "".join(letter for letter in version if letter.isalnum() or letter in ".+-") or "unknown"
