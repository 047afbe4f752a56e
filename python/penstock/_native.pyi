"""The native module. Timeouts are in seconds, sizes and offsets in bytes."""

from builtins import list as _list
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, ClassVar, Self, TypeAlias, TypedDict, final

from typing_extensions import disjoint_base

from penstock.errors import PenstockError

__all__ = [
    "Advisor",
    "Answers",
    "Blocks",
    "Buffer",
    "Catalogue",
    "Choice",
    "Coder",
    "Completion",
    "CopyTimes",
    "Descriptor",
    "DirectionTimes",
    "EncryptionKeys",
    "Engine",
    "EngineCache",
    "Event",
    "Fence",
    "FileDigests",
    "GroupSpec",
    "Keeper",
    "Lookup",
    "ModelVariant",
    "Moved",
    "Outcome",
    "PieceTimes",
    "PoolFinder",
    "PoolGroup",
    "PrefixHasher",
    "PromptPrefix",
    "Reach",
    "Step",
    "Store",
    "TensorView",
    "TokenIds",
    "Trace",
    "__version__",
    "attended",
    "built_in_schemes",
    "check_ranks",
    "check_store",
    "cuda_calibration",
    "digest",
    "find_stores_with",
    "host_changes",
    "objects",
    "panics",
    "parse_size",
    "policies",
    "read_question",
    "routings",
    "slot_stride",
    "store_checks",
    "tenant_namespace",
]

__version__: str

_Span: TypeAlias = tuple[int, int, int, int]

@disjoint_base
class Advisor:
    """Learns how long steps and loads of one engine take, and advises what to load.

    The caller gives all times, in seconds of one clock. A `policy` is `auto`, `always` or `never`;
    any other raises `ConfigError`."""

    def __new__(cls, tokens_per_step: int, lanes: int = 1) -> Self:
        """`tokens_per_step` is the most tokens of a step. `lanes` is the number of objects that a
        load fetches at a time."""
    def on_step(self, began: float | None, step: int, tokens: int, pairs: int) -> None:
        """A step that computes `tokens` prompt tokens goes to the workers. These tokens attend to
        `pairs` tokens in sum. If `began` is None, it counts from the end of the step before."""
    def on_output(self, now: float, steps: Iterable[int]) -> None:
        """Steps are done. `steps` names those of them that computed prompts."""
    def on_begin(
        self,
        now: float,
        number: int,
        host_bytes: int,
        pool_bytes: int,
        *,
        patience: float | None = None,
        is_probe: bool = False,
    ) -> None:
        """A load, prefetch or probe begins. `host_bytes` come from host memory and `pool_bytes`
        from the pool. It is given up after `patience` seconds if nothing has come."""
    def on_end(self, number: int, seconds: float, missing_bytes: int) -> int | None:
        """The load, prefetch or probe `number` is over. It took `seconds`, and `missing_bytes` of
        it did not come. Returns the bytes that a probe brought; None for a load or a prefetch."""
    def advise(
        self,
        first: int,
        reaches: Sequence[Reach],
        prompt: int,
        policy: str = "auto",
        *,
        may_check: bool = False,
    ) -> Choice:
        """How far to load a prompt of `prompt` tokens. The first `first` tokens are computed.

        A load may end at any of `reaches`, the nearest first. With `may_check`, the answer is "not
        at all" now and then, to check whether loading pays."""
    def awaits_lookup(
        self, first: int, reach: Reach, prompt: int, latency: float | None, policy: str = "auto"
    ) -> bool:
        """Whether a request waits for its look-up. If not, the request is computed, and the answer
        serves the next request.

        `reach` is the load if the pool had all blocks of the look-up. `latency` is the time of the
        last look-up, infinite if it failed. A request waits if load and look-up together are
        expected to pay. Even then it does not wait if it is time to measure computing, and the load
        does not clearly pay."""
    def patience(
        self, choice: Choice, host_bytes: int, pool_bytes: int, objects: int
    ) -> float | None:
        """Seconds after which to give up a load, if nothing of it has come. None if there is no
        reason to give it up.

        The load begins now, as advised in `choice`, and has `objects` objects."""
    def saved_seconds(self, first: int, end: int, prompt: int) -> float | None:
        """Seconds of computation that a load of a prompt's tokens from `first` to `end` saves. The
        time of the load itself is not subtracted. None before a step of hundreds of tokens was
        seen."""
    def wants_probe(
        self, now: float, first: int, reach: Reach, prompt: int, block: tuple[int, int]
    ) -> int:
        """Blocks to fetch from the pool now for a probe, which only measures the pool. Mostly 0.

        A prompt of `prompt` tokens is computed from `first` on, though `reach` could have been
        loaded. `block` is the bytes and the objects of a block."""
    def load_seconds(self, reach: Reach) -> float | None:
        """Expected seconds of a load that begins now. None if it needs the pool and nothing is
        known of the pool's speed; infinite if the pool is in doubt."""

def attended(first: int, end: int) -> int:
    """Sum over the tokens from `first` to `end` of the tokens that each attends to: all tokens
    before it, and itself."""

@final
class Choice:
    """The decision about a run of tokens that could be loaded. Times are in seconds."""

    def __new__(cls, end: int, load: float | None, recompute: float | None) -> Choice: ...
    @property
    def end(self) -> int:
        """Load up to this token. If nothing is to be loaded, this is the start of the run."""
    @property
    def load(self) -> float | None:
        """Expected time of the load; None if it is not known."""
    @property
    def recompute(self) -> float | None:
        """Expected time to compute the prompt's rest if nothing is loaded; None if it is not
        known."""

@final
class Reach:
    """A token at which a load may end, and the bytes to move for a load up to there."""

    def __new__(cls, end: int, host_bytes: int, pool_bytes: int) -> Reach: ...
    @property
    def end(self) -> int: ...
    @property
    def host_bytes(self) -> int:
        """Bytes that are in host memory."""
    @property
    def pool_bytes(self) -> int:
        """Bytes that are only in the pool."""

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
    @property
    def header_bytes(self) -> int: ...
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
    def get_whole(
        self, items: Sequence[tuple[bytes, int]], *, timeout: float
    ) -> _list[bytes | PenstockError | None]: ...
    def examine(self, items: Sequence[tuple[bytes, bytes]]) -> _list[tuple[str, str]]: ...
    def put_whole(
        self, items: Sequence[tuple[bytes, bytes]], *, timeout: float
    ) -> _list[bool | PenstockError]: ...
    def remove(self, keys: Sequence[bytes], *, timeout: float) -> int: ...
    def remove_damaged(self, values: Sequence[tuple[bytes, int]], *, timeout: float) -> None: ...
    def retire(self, namespace: bytes, *, timeout: float) -> None: ...
    def list(self, namespace: bytes, *, timeout: float) -> _list[tuple[bytes, int]]: ...
    def usage(self, *, timeout: float) -> _list[tuple[bytes, int, int, float | None]]: ...
    def describe(self, *, timeout: float) -> dict[str, str]: ...
    def marks(self, *, timeout: float) -> _list[tuple[str, str, int, bytes, bool]]: ...
    def stats(self) -> dict[str, int]: ...

def find_stores_with(
    finder: Callable[[], Sequence[tuple[str, str, Sequence[str], str]]],
) -> None: ...
def built_in_schemes() -> list[str]: ...
def store_checks() -> list[str]: ...
def check_store(url: str, check: str) -> str | None: ...

@final
class TensorView:
    def __new__(
        cls,
        layer: int,
        *,
        address: int,
        shape: Sequence[int],
        strides: Sequence[int],
        itemsize: int,
        storage_address: int,
        storage_bytes: int,
    ) -> TensorView: ...
    @property
    def layer(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def storage_address(self) -> int: ...
    @property
    def storage_bytes(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class GroupSpec:
    def __new__(
        cls, block_tokens: int, *, window: int | None = None, keeps_state: bool = False
    ) -> GroupSpec: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def window(self) -> int | None: ...
    @property
    def keeps_state(self) -> bool: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class PoolGroup:
    def __new__(
        cls, namespace: bytes, spans: Sequence[_Span], *, block_bytes: int | None = None
    ) -> PoolGroup: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def spans(self) -> list[_Span]: ...
    @property
    def block_bytes(self) -> int | None: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Descriptor:
    @staticmethod
    def detect(
        views: Sequence[TensorView],
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
class FileDigests:
    """Digests of files, made by native threads beside other work.

    With a folder as `cache`, files that did not change since are not read again, and of the
    processes that want the same files one reads.
    """

    def __new__(
        cls,
        paths: Sequence[str | PathLike[str]],
        *,
        threads: int,
        cache: str | PathLike[str] | None = None,
    ) -> FileDigests: ...
    def wait(self, timeout: float | None = None) -> _list[bytes] | None:
        """The digests, in the order of their files; None if they are not there in time.

        Raises:
            IoError: a file cannot be read.
            ConfigError: a file was changed while it was read.
        """

    @property
    def progress(self) -> tuple[int, int, int]:
        """Bytes of all files, bytes that are digested or were known, and bytes that were read."""

def digest(source: Any, *, threads: int = 1) -> bytes:
    """The digest of a buffer's bytes, which is that of a file with this content."""

_Parent: TypeAlias = tuple[bytes, int]

@final
class Blocks:
    def __new__(cls, blocks: Sequence[tuple[int, int, bytes, _Parent | None]]) -> Blocks: ...
    @classmethod
    def decode(cls, encoded: bytes) -> Blocks: ...
    def encode(self) -> bytes: ...
    @property
    def block_ids(self) -> list[int]: ...
    @property
    def places(self) -> list[tuple[int, int]]: ...
    def __len__(self) -> int: ...
    def __eq__(self, value: object, /) -> bool: ...

def host_changes(encoded: bytes) -> list[tuple[int, bytes, bool]]: ...

@final
class Event:
    RELEASED: ClassVar[Event]
    STORED: ClassVar[Event]
    LOADED: ClassVar[Event]
    PREFETCHED: ClassVar[Event]

@final
class Outcome:
    STORED: ClassVar[Outcome]
    ALREADY_PRESENT: ClassVar[Outcome]
    LOADED: ClassVar[Outcome]
    KEPT: ClassVar[Outcome]
    DROPPED: ClassVar[Outcome]
    MISS: ClassVar[Outcome]
    REJECTED: ClassVar[Outcome]
    FOREIGN: ClassVar[Outcome]
    TIMED_OUT: ClassVar[Outcome]
    CANCELLED: ClassVar[Outcome]
    SKIPPED: ClassVar[Outcome]
    FAILED: ClassVar[Outcome]
    DISAGREED: ClassVar[Outcome]

@final
class Coder:
    elements: ClassVar[_list[str]]
    def __new__(cls, element: str, *, baseline: bool = False) -> Self: ...
    @property
    def speed(self) -> str: ...
    def encode(self, payload: Any, into: Any) -> int | None: ...
    def decode(self, coded: Any, into: Any) -> None: ...

@final
class Completion:
    @property
    def job(self) -> int: ...
    @property
    def event(self) -> Event: ...
    @property
    def seconds(self) -> float: ...
    @property
    def outcomes(self) -> list[Outcome]: ...
    @property
    def missing(self) -> list[int]: ...
    @property
    def lost(self) -> list[int]: ...
    @property
    def foreign(self) -> list[int]: ...
    @property
    def loaded_bytes(self) -> int: ...
    @property
    def kept_bytes(self) -> int: ...
    @property
    def stored_bytes(self) -> int: ...
    @property
    def dropped_objects(self) -> int: ...
    @property
    def failed_objects(self) -> int: ...
    @property
    def rejected_objects(self) -> int: ...
    @property
    def foreign_objects(self) -> int: ...
    @property
    def missing_bytes(self) -> int: ...

def slot_stride(slot_bytes: int) -> int: ...
def panics() -> list[tuple[str, int, str]]:
    """The panics of native threads since this process began: for each place its name, how many
    there were, and what the last one said."""

@final
class Engine:
    def __new__(
        cls,
        store: Store,
        *,
        slot_bytes: int,
        slots: int,
        node: Store | None = None,
        keep: bool = True,
        in_place: bool = True,
        copy_lanes: int = 1,
        get_lanes: int = 2,
        put_lanes: int = 1,
        step_objects: int = 0,
        compress: bool = False,
        store_wait: float = 0.1,
        store_timeout: float = 5.0,
        trusts: bool = False,
    ) -> Engine: ...
    def register(
        self,
        descriptor: Descriptor,
        group: int = 0,
        *,
        spans: Sequence[_Span] | None = None,
        pages_per_block: int = 1,
        replica: tuple[int, int] = ...,
        cuda_device: int | None = None,
        element: str | None = None,
        numbers: str | None = None,
        reads_tokens: bool = False,
        routes: bool = False,
    ) -> None: ...
    def register_elsewhere(self, group: int) -> None: ...
    def name_group(self, group: int, namespace: bytes) -> None: ...
    def set_writer(self, writer: int) -> None: ...
    def unregister(self) -> None: ...
    def raise_fence(self, stream: int, *, cuda_device: int) -> Fence: ...
    def submit_store(
        self,
        job: int,
        blocks: Blocks,
        *,
        salt: bytes | None = None,
        tenant: str = "",
        awaited: bool = False,
        witnesses: int = 0,
        after: Fence | None = None,
    ) -> None: ...
    def submit_load(
        self,
        job: int,
        blocks: Blocks,
        timeout: float,
        *,
        prefix: bool = False,
        pace: float = 0.0,
        salt: bytes | None = None,
        tenant: str = "",
        after: Fence | None = None,
    ) -> None: ...
    def submit_prefetch(
        self,
        job: int,
        blocks: Blocks,
        timeout: float,
        *,
        salt: bytes | None = None,
        tenant: str = "",
    ) -> None: ...
    def decline_store(self, job: int, blocks: Blocks) -> None: ...
    def decline_load(self, job: int, blocks: Blocks) -> None: ...
    def release(self, job: int) -> None: ...
    def take_host_changes(self) -> bytes: ...
    def poll(self) -> list[Completion]: ...
    def wait(self, timeout: float) -> bool: ...
    def wait_released(self, jobs: Sequence[int], timeout: float) -> bool: ...
    def cancel(self, job: int) -> None: ...
    def drain(self, timeout: float) -> bool: ...
    def shutdown(self, timeout: float) -> bool: ...
    def is_copying(self) -> bool: ...
    @staticmethod
    def leave(engine: Engine, memory: list[object]) -> None: ...
    def take_faults(self) -> list[tuple[str, int]]: ...
    def stats(self) -> dict[str, int]: ...

@final
class Fence: ...

@final
class Answers:
    """What the answers of look-ups say that have come."""

    @property
    def found(self) -> int:
        """Blocks that the pool has."""
    @property
    def failed(self) -> int:
        """Look-ups that failed."""
    @property
    def seconds(self) -> list[float]:
        """Seconds that each look-up took, infinite if it failed; the last one at the end."""

@final
class Moved:
    """What a load or a prefetch moves, over all ranks."""

    @property
    def host_bytes(self) -> int:
        """Bytes that host memory has."""
    @property
    def pool_bytes(self) -> int:
        """Bytes that come from the pool."""
    @property
    def objects(self) -> int:
        """Objects on one rank."""

@final
class Step:
    """What a step does. Requests are named by their positions in the step."""

    @property
    def started(self) -> list[int]:
        """Requests that begin."""
    @property
    def filled(self) -> list[tuple[int, int]]:
        """Requests that fill a block, each with its computed tokens after the step."""
    @property
    def prompts(self) -> list[tuple[int, int]]:
        """Ranges of tokens of prompts that are computed."""

@final
class Catalogue:
    """The scheduler half's knowledge of blocks: which are in the pool, which are in host memory,
    and which are under way. Requests go by the engine's ids, groups by their positions."""

    def __new__(
        cls,
        groups: Sequence[GroupSpec],
        hash_tokens: int,
        *,
        drops_last: bool = False,
        remembered: int = 262144,
    ) -> Self: ...
    def set_holdings(self, holdings: Sequence[tuple[int, int, int]]) -> None: ...
    @property
    def alignment(self) -> int: ...
    def last_end(self, tokens: int) -> int: ...
    def __len__(self) -> int: ...
    def add(self, request: str, prompt_tokens: int, *, tenant: str = "") -> None: ...
    def extend(self, request: str, hashes: list[bytes]) -> None: ...
    def remove(self, request: str) -> None: ...
    def ask(
        self,
        request: str,
        lookup: Lookup,
        groups: Sequence[PoolGroup],
        timeout: float,
    ) -> int | None: ...
    def look_up_node_memory(
        self,
        request: str,
        node: Store,
        groups: Sequence[PoolGroup],
    ) -> None: ...
    def take_answers(self, lookup: Lookup) -> Answers: ...
    def set_miss(self, request: str) -> None: ...
    def drop_lookup(self, request: str, lookup: Lookup) -> None: ...
    def is_asked(self, request: str) -> bool | None: ...
    def reaches(self, request: str, first: int, limit: int) -> list[Reach]: ...
    def whole(self, request: str, first: int, limit: int) -> Reach: ...
    def is_loading(self, request: str, first: int, end: int) -> bool: ...
    def lacking(self, request: str, first: int, end: int) -> int | None: ...
    def begin_load(
        self, request: str, job: int, first: int, end: int, tables: Sequence[Sequence[int]]
    ) -> tuple[Blocks, Moved]: ...
    def begin_prefetch(
        self,
        request: str,
        job: int,
        first: int,
        end: int,
        most: int,
        *,
        lacking: bool = False,
    ) -> tuple[Blocks, Moved] | None: ...
    def end(self, job: int) -> None: ...
    def release(self, job: int) -> None: ...
    def lose(self, job: int, positions: Sequence[int]) -> None: ...
    def set_foreign(self, job: int, positions: Sequence[int]) -> None: ...
    @property
    def loads(self) -> int: ...
    @property
    def prefetched(self) -> int: ...
    def begin_store(
        self,
        request: str,
        job: int,
        tokens: int,
        tables: Sequence[Sequence[int]],
        null: int,
        *,
        witnesses: int = 0,
    ) -> tuple[Blocks, int, bool] | None: ...
    def is_own(self, request: str, tokens: int) -> bool: ...
    def on_read(self, job: int) -> None: ...
    def end_store(
        self, job: int, unstored: Sequence[int], disagreed: Sequence[int] | None = None
    ) -> int: ...
    @property
    def is_reading(self) -> bool: ...
    def readers(self, blocks: Sequence[int]) -> list[int]: ...
    def keep(
        self,
        request: str,
        keeper: Keeper,
        *,
        end: int,
        account: bytes,
        seconds: float,
    ) -> None: ...
    def limit_stores(self, request: str, tokens: int) -> None: ...
    def let_go(self, request: str, keeper: Keeper, tokens: int) -> None: ...
    def step(
        self,
        requests: Sequence[str],
        computed: Sequence[int],
        tokens: dict[str, int],
        *,
        are_final: bool = True,
    ) -> Step: ...
    def note_state(self, request: str, group: int, tokens: int) -> None: ...
    def note_loaded(self, request: str, first: int, end: int) -> None: ...
    def pause(self, request: str, lookup: Lookup) -> None: ...
    def change_host(self, changes: bytes) -> None: ...
    def forget_pool(self) -> None: ...
    def forget_host(self) -> None: ...

@final
class Keeper:
    """Touches kept blocks of a store, and removes others, on a native thread."""

    def __new__(
        cls,
        store: Store,
        groups: Sequence[PoolGroup],
        *,
        share: float,
        account_share: float,
        assumed_bytes: int,
        every: float,
    ) -> Keeper: ...
    def stats(self) -> dict[str, int]: ...
    def shutdown(self, timeout: float = 5.0) -> bool: ...

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

@final
class PrefixHasher:
    def __new__(cls, algorithm: str, seed: bytes, block_tokens: int) -> PrefixHasher: ...
    def prefix(
        self,
        prompt: _list[int] | TokenIds,
        *,
        lora: Sequence[str] = ...,
        cache_salt: str | None = None,
    ) -> PromptPrefix: ...

@final
class TokenIds:
    def __len__(self) -> int: ...

def read_question(
    body: bytes, most_tokens: int
) -> tuple[str, TokenIds | str, str | None, str | tuple[str, str, str] | None, str | None]: ...

@final
class PromptPrefix:
    @property
    def tokens(self) -> int: ...
    @property
    def hashes(self) -> _list[bytes]: ...

@final
class ModelVariant:
    def __new__(
        cls,
        groups: Sequence[tuple[GroupSpec, PoolGroup]],
        hash_tokens: int,
        *,
        drops_last: bool = False,
    ) -> ModelVariant: ...
    def of_tenant(self, name: str) -> ModelVariant: ...

@final
class PoolFinder:
    def __new__(
        cls, store: Store, *, blocks: int, believe_found: float, believe_missing: float
    ) -> PoolFinder: ...
    def known(self, variant: ModelVariant, prefix: PromptPrefix, *, own: int = 0) -> int | None: ...
    def find(
        self, variant: ModelVariant, prefix: PromptPrefix, *, timeout: float, own: int = 0
    ) -> int: ...
    def stats(self) -> tuple[int, int]: ...
    def forget(self) -> None: ...

@final
class EngineCache:
    def __new__(cls, blocks: int) -> EngineCache: ...
    def stored(self, group: int, block_tokens: int, hashes: Sequence[int | bytes]) -> None: ...
    def removed(self, group: int, hashes: Sequence[int | bytes]) -> None: ...
    def clear(self) -> None: ...
    def stats(self) -> tuple[int, bool]: ...
    def tokens(
        self, variant: ModelVariant, groups: Sequence[int], prefix: PromptPrefix
    ) -> int | None: ...

def objects(
    share: _Span, *, layers_per_object: int | None = None, heads_per_object: int | None = None
) -> list[_Span]: ...

@final
class PieceTimes:
    @property
    def piece_bytes(self) -> int: ...
    @property
    def copy_engine_seconds(self) -> float: ...
    @property
    def kernel_seconds(self) -> float: ...

@final
class DirectionTimes:
    @property
    def copy_engine_from(self) -> int: ...
    @property
    def pieces(self) -> list[PieceTimes]: ...

@final
class CopyTimes:
    @property
    def copy_bytes(self) -> int: ...
    @property
    def gather(self) -> DirectionTimes: ...
    @property
    def scatter(self) -> DirectionTimes: ...

def cuda_calibration(cuda_device: int) -> CopyTimes: ...
def check_ranks(
    shares: Sequence[_Span],
    layers: int,
    heads: int,
    *,
    layers_per_object: int | None = None,
    heads_per_object: int | None = None,
) -> tuple[list[_Span], list[tuple[int, int]]]: ...
def parse_size(text: str) -> int: ...
def tenant_namespace(namespace: bytes, tenant: str) -> bytes: ...

class _Replay(TypedDict):
    total: dict[str, int]
    windows: _list[dict[str, int]]
    ttft: dict[float, float]
    busiest_node: int
    host_blocks_held: int
    pool_blocks_held: int

def policies() -> list[str]: ...
def routings() -> list[str]: ...

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
    def scaled(
        self,
        populations: int,
        *,
        common_share: float = 0.05,
        stagger: float = 60.0,
        seed: int = 0,
    ) -> Trace:
        """The trace of so many populations of users. Each asks for the same prompts with texts of
        its own. Blocks that at least `common_share` of the sessions use are common to all. The
        beginnings of the populations are spread over `stagger` seconds, by `seed`.

        Raises:
            ConfigError: the numbers make no sense, or there would be 2^32 different blocks."""
    @property
    def populations(self) -> int: ...
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
    def common_blocks(self) -> int:
        """Different blocks that all populations share; 0 if there is one population."""
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
        tiers: Sequence[tuple[bool, int]],
        bytes_per_token: int,
        policy: str,
        pool_policy: str,
        routing: str,
        prefill_speed: float,
        host_speed: tuple[float, float],
        pool_speed: tuple[float, float],
        load_policy: str,
        tokens_per_step: int,
        get_lanes: int,
        lookup_timeout: float,
        load_timeout: float,
        load_floor: float,
        windows: int = 1,
        progress: Callable[[int], object] | None = None,
    ) -> list[_Replay]: ...
