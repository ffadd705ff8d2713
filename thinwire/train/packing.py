"""Any state as JSON and tensors, and back: what a checkpoint's two files hold. Nothing here can run code.

{"lr": 0.1, 0: tensor, "best": (inf,)}
->  {"dict": [["lr", 0.1], [0, {"tensor": "state[0]"}], ["best", {"tuple": [{"float": "7ff0000000000000"}]}]]}
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open

from thinwire.errors import CheckpointError

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"

# A state may be read from a stranger's file: these bound what that can cost. Writing keeps to them too.
MAX_DEPTH = 100
MAX_INT_BITS = 2048  # in decimal always below the interpreter's own limit on digits, which is at least 640

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def pack(value: object, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Json:
    """Turn a state into JSON, and put its tensors into `tensors` under the path that finds them in the state."""
    if depth > MAX_DEPTH:
        raise ValueError(f"The state is nested more than {MAX_DEPTH} deep, or contains itself: {path[:200]}...")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        return _plain(value, path)
    if isinstance(value, float):
        # JSON has no name for infinity, nor for the 2^53 NaNs.
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, torch.Tensor):
        tensors[path] = _storable(value, path)
        return {"tensor": path}
    if isinstance(value, dict):
        keys = [_key(key, path) for key in value]
        items = zip(keys, value.values(), strict=True)
        return {"dict": [[key, pack(item, f"{path}[{key!r}]", tensors, depth + 1)] for key, item in items]}
    if isinstance(value, list | tuple):
        packed = [pack(item, f"{path}[{i}]", tensors, depth + 1) for i, item in enumerate(value)]
        return {"tuple": packed} if isinstance(value, tuple) else packed
    allowed = "dicts, lists, tuples, tensors, ints, floats, bools, strings and None"
    raise TypeError(f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold; it holds {allowed}.")


def unpack(value: Json, tensors: dict[str, torch.Tensor], depth: int = 0) -> object:
    """Build the state that `pack` described, taking each tensor out of `tensors`."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    match value:
        case list():
            return [unpack(item, tensors, depth + 1) for item in value]
        case {"tuple": list(items)}:
            return tuple(unpack(item, tensors, depth + 1) for item in items)
        case {"dict": list(pairs)}:
            state = {_key(key, "key"): unpack(item, tensors, depth + 1) for key, item in map(_pair, pairs)}
            if len(state) != len(pairs):
                raise ValueError("a dict has the same key twice")
            return state
        case {"tensor": str(name)}:
            return _take(tensors, name)
        case {"float": str(bits)}:
            return _from_bits(bits)
        case dict():
            raise ValueError(f"an object of unknown kind {reprlib.repr([*value])}")
    return value


def _take(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise ValueError(f"the tensor {reprlib.repr(name)} is not in the file, or is wanted twice")
    return tensors.pop(name)


def _from_bits(bits: str) -> float:
    if not re.fullmatch("[0-9a-f]{16}", bits):
        raise ValueError(f"{reprlib.repr(bits)} are not the bits of a float")
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


def _pair(value: Json) -> list[Json]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{reprlib.repr(value)} is not a key and a value")
    return value


def _key(key: object, path: str) -> int | str:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"{path} has the key {reprlib.repr(key)}; keys in a checkpoint are strings or ints.")
    return _plain(key, path)


def _plain(value: int | str, path: str) -> int | str:
    """The value without its subclass, if JSON keeps it exactly."""
    if isinstance(value, str):
        text = str.__str__(value)
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{path} has a surrogate in the text {text[:40]!r}, which is no valid Unicode.")
        return text
    if value.bit_length() > MAX_INT_BITS:
        raise ValueError(f"{path} has an int of {value.bit_length()} bits; a checkpoint holds up to {MAX_INT_BITS}.")
    return int(value)


def _storable(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """The tensor itself, if its bytes are all there is to it."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise TypeError(f"{path} is a tensor without dense memory ({tensor.layout} on {tensor.device}).")
    if tensor.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise TypeError(f"{path} is a tensor of {tensor.dtype}; a checkpoint holds {names}.")
    return tensor


def tensor_file(tensors: dict[str, torch.Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece.

    The library's own writer wants all tensors contiguous and apart in memory at the same time and hides the errno of a
    full disk. This one copies at most one tensor, and its bytes are hashed on their way.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # widest first keeps all of them aligned
    header: dict[str, Json] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        yield _bytes(tensors[name])


def _bytes(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    # One entry counts as contiguous whatever its stride is, but only stride 1 can be seen as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file whose hash is already known to be right."""
    try:
        with safe_open(path, framework="pt") as file:
            # Cloned, because what comes out of the library is mapped from the file and would change with it.
            return {name: file.get_tensor(name).clone() for name in file.keys()}
    except Exception as exc:  # The hash says who wrote it, not that they meant well: anything may be wrong inside.
        raise CheckpointError(f"{path} is no valid safetensors file: {str(exc)[:200]}.") from exc
