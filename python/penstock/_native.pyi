"""The native part. Timeouts are in seconds, sizes and offsets in bytes."""

from builtins import list as _list
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, TypeAlias, TypedDict, final

from penstock.errors import PenstockError

__all__ = [
    "Buffer",
    "Descriptor",
    "EncryptionKeys",
    "Engine",
    "Fence",
    "Lookup",
    "Store",
    "Trace",
    "check_ranks",
    "cuda_calibration",
    "objects",
    "parse_size",
]

_Span: TypeAlias = tuple[int, int, int, int]

@final
class Buffer:
    def __new__(cls, source: Any, *, writable: bool = False) -> Buffer: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def address(self) -> int: ...
    def __len__(self) -> int: ...

class _Capabilities(TypedDict):
    shared: bool
    persistent: bool
    bounded: bool
    max_value_bytes: int

@final
class Store:
    @staticmethod
    def open(
        url: str,
        *,
        client_name: str = "penstock",
        connect_timeout: float = 1.0,
        connections: int = 8,
    ) -> Store: ...
    def guarded(self) -> Store: ...
    def encrypted(self, keys: EncryptionKeys) -> Store: ...
    def unencrypted(self) -> Store: ...
    @property
    def url(self) -> str: ...
    def capabilities(self) -> _Capabilities: ...
    def contains(self, keys: Sequence[bytes], *, timeout: float) -> _list[bool]: ...
    def put(self, key: bytes, value: Any, *, timeout: float) -> bool: ...
    def put_many(
        self, items: Sequence[tuple[bytes, Any]], *, timeout: float
    ) -> _list[bool | PenstockError]: ...
    def get(self, key: bytes, into: Any, *, timeout: float) -> int | None: ...
    def get_many(
        self, items: Sequence[tuple[bytes, Any]], *, timeout: float
    ) -> _list[int | PenstockError | None]: ...
    def remove(self, keys: Sequence[bytes], *, timeout: float) -> int: ...
    def list(self, namespace: bytes, *, timeout: float) -> _list[tuple[bytes, int]]: ...
    def usage(self, *, timeout: float) -> _list[tuple[bytes, int, int]]: ...
    def describe(self, *, timeout: float) -> dict[str, str]: ...
    def stats(self) -> dict[str, int]: ...

@final
class Descriptor:
    @staticmethod
    def detect(
        views: Sequence[tuple[int, int, Sequence[int], Sequence[int], int, int, int]],
        *,
        head_start: int = 0,
        stage: tuple[int, int] | None = None,
    ) -> Descriptor: ...
    @staticmethod
    def packed(
        layout: str, share: _Span, *, blocks: int, tokens: int, content_bytes: int
    ) -> Descriptor: ...
    def with_interior(self, interior: str) -> Descriptor: ...
    @property
    def layout(self) -> str | None: ...
    @property
    def share(self) -> _Span: ...
    @property
    def layers(self) -> list[int]: ...
    @property
    def blocks(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def content_bytes(self) -> int: ...
    @property
    def interior(self) -> str: ...
    @property
    def bases(self) -> list[tuple[int, int]]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def contiguity(self) -> str: ...
    @property
    def region_bytes(self) -> list[int]: ...
    @property
    def region_addresses(self) -> list[int]: ...
    def block_bytes(self, span: _Span) -> int: ...
    def segments(self, block: int, span: _Span) -> list[tuple[int, int, int]]: ...
    def gather(
        self,
        blocks: Sequence[int],
        span: _Span,
        into: Any,
        *,
        checksum: bool = False,
        cuda_device: int | None = None,
    ) -> int: ...
    def scatter(
        self,
        blocks: Sequence[int],
        span: _Span,
        source: Any,
        *,
        cuda_device: int | None = None,
    ) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...

@final
class EncryptionKeys:
    @staticmethod
    def load(file: str | PathLike[str] | None = None) -> EncryptionKeys | None: ...
    @property
    def fingerprints(self) -> _list[tuple[str, str]]: ...

@final
class Engine:
    def __new__(
        cls,
        store: Store,
        *,
        slot_bytes: int,
        slots: int,
        keep: bool = True,
        copy_lanes: int = 1,
        get_lanes: int = 2,
        put_lanes: int = 1,
        step_objects: int = 0,
    ) -> Engine: ...
    def register(
        self, descriptor: Descriptor, group: int = 0, *, cuda_device: int | None = None
    ) -> None: ...
    def unregister(self) -> None: ...
    def raise_fence(self, stream: int, *, cuda_device: int) -> Fence: ...
    def submit_store(
        self,
        job: int,
        objects: Sequence[tuple[int, bytes, Sequence[int]]],
        *,
        parents: Sequence[tuple[bytes, int]] | None = None,
        after: Fence | None = None,
        context: bytes | None = None,
    ) -> None: ...
    def submit_load(
        self,
        job: int,
        objects: Sequence[tuple[int, bytes, Sequence[int]]],
        timeout: float,
        prefix: bool = False,
        *,
        parents: Sequence[tuple[bytes, int]] | None = None,
        pace: float = 0.0,
        after: Fence | None = None,
        context: bytes | None = None,
    ) -> None: ...
    def submit_prefetch(
        self,
        job: int,
        objects: Sequence[tuple[int, bytes, Sequence[int]]],
        timeout: float,
        *,
        parents: Sequence[tuple[bytes, int]] | None = None,
        context: bytes | None = None,
    ) -> None: ...
    def release(self, job: int) -> None: ...
    def take_host_changes(self) -> list[tuple[bytes, bool]]: ...
    def poll(self) -> list[tuple[int, str, list[tuple[str, int]], float]]: ...
    def wait(self, timeout: float) -> bool: ...
    def wait_released(self, jobs: Sequence[int], timeout: float) -> bool: ...
    def cancel(self, job: int) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def shutdown(self, timeout: float) -> bool: ...
    def take_faults(self) -> list[tuple[str, int]]: ...
    def stats(self) -> dict[str, int]: ...

@final
class Fence: ...

@final
class Lookup:
    def __new__(cls, store: Store, *, threads: int = 2) -> Lookup: ...
    def submit(
        self,
        id: int,
        namespace: bytes,
        chunks: Sequence[bytes],
        spans: Sequence[_Span],
        timeout: float,
    ) -> None: ...
    def poll(self) -> list[tuple[int, list[bool] | str, float]]: ...
    def wait(self, timeout: float) -> bool: ...
    def cancel(self, id: int) -> None: ...
    def shutdown(self, timeout: float = 5.0) -> bool: ...

def objects(
    share: _Span, *, layers_per_object: int | None = None, heads_per_object: int | None = None
) -> list[_Span]: ...

_Direction: TypeAlias = tuple[int, _list[tuple[int, float, float]]]

def cuda_calibration(cuda_device: int) -> tuple[int, _Direction, _Direction]: ...
def check_ranks(
    shares: Sequence[_Span],
    layers: int,
    heads: int,
    *,
    layers_per_object: int | None = None,
    heads_per_object: int | None = None,
) -> tuple[list[_Span], list[tuple[int, int]]]: ...
def parse_size(text: str) -> int: ...

class _Replay(TypedDict):
    total: dict[str, int]
    windows: _list[dict[str, int]]
    ttft: dict[float, float]
    busiest_node: int
    host_blocks_held: int
    pool_blocks_held: int

@final
class Trace:
    @staticmethod
    def read(
        path: str | PathLike[str],
        *,
        block_tokens: int | None = None,
        text_bytes_per_token: float = 4.0,
        session_interval: float = 60.0,
    ) -> Trace: ...
    @property
    def format(self) -> str: ...
    @property
    def requests(self) -> int: ...
    @property
    def sessions(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def unique_blocks(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def duration(self) -> float: ...
    def infinite_hits(self) -> int: ...
    def belady_hits(self, capacity: int) -> int: ...
    def hits(self, policy: str, capacity: int) -> int: ...
    def replay(
        self,
        *,
        nodes: int,
        host_bytes: int,
        pool_bytes: int,
        bytes_per_token: int,
        policy: str,
        pool_policy: str,
        routing: str,
        prefill_speed: float,
        host_speed: tuple[float, float],
        pool_speed: tuple[float, float],
        windows: int = 1,
        progress: Callable[[int], object] | None = None,
    ) -> _Replay: ...
