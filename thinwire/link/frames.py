"""What travels between two ranks of a `TcpLink`: a hello each way, then frames of a header, a payload and its checksum.

No length that a peer claims is believed here: a header is only taken apart, and `Connection` decides what to do.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch

MAGIC = b"tnwr"
VERSION = 2

# Only ever append. A PING is answered by a PONG at once; both are a header and nothing else.
DATA, GOODBYE, ABORT, LOST, PING, PONG = range(6)
PROBES = (PING, PONG)

# Only ever append: the position is the code on the wire.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

RUN_ID_BYTES = 8
REASON_BYTES = 1024

_HELLO = struct.Struct(f"!4sB3x{RUN_ID_BYTES}sII")
# magic, version, kind, dtype, run id, sequence, step, plan, collective, nbytes, lay, after
_FIELDS = struct.Struct(f"!4sBBB{RUN_ID_BYTES}sIq8s8sQHHx")
_HEADER = struct.Struct(_FIELDS.format + "I")  # and the crc of all that

_ORIGIN = struct.Struct("!I")
_HELD = struct.Struct("!Q")  # nanoseconds, where other frames have their plan
_CLEAR, _DELAYED = bytes(8), bytes(7) + b"\1"  # where other frames have their collective

HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size
TRAILER_BYTES = 4  # the crc of the payload, behind it: so it can be computed while the payload leaves
FRAME_BYTES = HEADER_BYTES + TRAILER_BYTES  # what a frame costs on top of its payload

SEQUENCES = 1 << 32  # after which they begin anew
AFTERS = 1 << 16
LAY_UNIT = 16e-6  # seconds
NEVER = (1 << 16) - 1  # of these: nothing has come yet, or it is a second ago and more

MAX_NAMES = 4096


class FrameError(Exception):
    """These bytes are not a frame of this run. The text completes 'rank 1 sent rank 0 ...'."""


class Hello(NamedTuple):
    """Who is calling, and for which run."""

    run_id: bytes
    rank: int
    world_size: int


def encode_hello(hello: Hello) -> bytes:
    return _HELLO.pack(MAGIC, VERSION, *hello)


def decode_hello(raw: bytes) -> Hello | None:
    """None for whatever is not a hello of our version."""
    magic, version, run_id, rank, world_size = _HELLO.unpack(raw)
    return Hello(run_id, rank, world_size) if (magic, version) == (MAGIC, VERSION) else None


class Header(NamedTuple):
    """What a frame says about itself. Names travel as digests, so that the header's size never depends on them.

    Attributes:
        lay: for how many LAY_UNITs the newest message of the other side had lain here when this frame left, or NEVER.
        after: the number of that message, as far as two bytes can tell.
    """

    kind: int
    dtype_code: int
    run_id: bytes
    sequence: int
    step: int
    plan: bytes
    collective: bytes
    nbytes: int
    lay: int = NEVER
    after: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_code]


def encode_header(header: Header) -> bytes:
    fields = _FIELDS.pack(MAGIC, VERSION, *header)
    return fields + zlib.crc32(fields).to_bytes(4, "big")


def decode_header(raw: bytes | bytearray, run_id: bytes, sequence: int) -> Header:
    """Take a header apart, or raise `FrameError` when it cannot be the next of this run's connection."""
    magic, version, *fields, crc = _HEADER.unpack(raw)
    header = Header._make(fields)
    if magic != MAGIC:
        raise FrameError(f"bytes that do not start a frame ({magic!r})")
    if version != VERSION:
        raise FrameError(f"a frame of protocol version {version}, this is version {VERSION}")
    if crc != zlib.crc32(raw[: _FIELDS.size]):
        raise FrameError("a frame header that was damaged on the way (crc)")
    if header.run_id != run_id:
        raise FrameError("a frame of another run")
    if header.sequence != sequence:
        raise FrameError(f"frame {header.sequence} where frame {sequence} was due")
    if header.kind > PONG or header.dtype_code >= len(DTYPES):
        raise FrameError(f"a frame of unknown kind {header.kind} or type {header.dtype_code}")
    if header.kind in PROBES and header.nbytes > 0:
        raise FrameError(f"a probe of {header.nbytes} bytes")
    if header.kind != DATA and header.nbytes > REASON_BYTES:
        raise FrameError(f"a farewell of {header.nbytes} bytes")
    return header


class Farewell(NamedTuple):
    """What a rank that gives up tells its peers: whether it has lost a rank or one has failed, which one, and why."""

    kind: int
    origin: int
    reason: str

    def encode(self) -> bytes:
        return encode_reason(self.origin, self.reason)


def encode_held(seconds: float) -> bytes:
    """How long a PING lay with the rank that answers it, so that its asker can leave that out."""
    return _HELD.pack(max(0, round(seconds * 1e9)))


def decode_held(header: Header) -> float:
    return float(_HELD.unpack(header.plan)[0]) / 1e9


def encode_delayed(delayed: bool) -> bytes:
    """Whether a PING or its PONG met payload where it was answered."""
    return _DELAYED if delayed else _CLEAR


def decode_delayed(header: Header) -> bool:
    return header.collective != _CLEAR


def encode_trailer(crc: int) -> bytes:
    return crc.to_bytes(TRAILER_BYTES, "big")


def encode_reason(origin: int, text: str) -> bytes:
    """Why a rank gives up: the rank that it all began with, and a bounded text that is cut between characters."""
    cut = text.encode()[: REASON_BYTES - _ORIGIN.size].decode(errors="ignore")
    return _ORIGIN.pack(origin) + cut.encode()


def decode_reason(raw: bytes) -> tuple[int, str]:
    if len(raw) < _ORIGIN.size:
        raise FrameError("a farewell without a reason")
    return _ORIGIN.unpack_from(raw)[0], raw[_ORIGIN.size :].decode(errors="replace")


def dtype_code(dtype: torch.dtype) -> int:
    if dtype not in _CODES:
        raise TypeError(f"{dtype} cannot travel over a TcpLink; view the tensor as torch.uint8.")
    return _CODES[dtype]


_NAMES: dict[bytes, str] = {}


@lru_cache(maxsize=MAX_NAMES)
def digest(name: str) -> bytes:
    """Eight bytes for a plan's or a collective's name."""
    if len(_NAMES) >= MAX_NAMES:
        # Both at once, so that every name which is still in use is remembered again when it is next used.
        _NAMES.clear()
        digest.cache_clear()
    value = hashlib.blake2b(name.encode(), digest_size=8).digest()
    _NAMES[value] = name
    return value


def name_of(value: bytes) -> str:
    """The name behind a digest, if this process has used that name itself (as ranks that drift apart usually have)."""
    return _NAMES.get(value, f"unknown here, digest {value.hex()}")
