"""What vLLM's workers need so that a trainer can push weights to an engine on a CPU.

vLLM's own backends of weight transfer need GPUs. The one here reads a model's folder. Workers
import this module, as that of their extension, before they load a model: see
:mod:`lab.engines.trainer`, which drives it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm import _custom_ops
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lab.engines.trainer import BACKEND
from lab.waiting import eventually


@dataclass
class Start(WeightTransferInitInfo):  # type: ignore[misc]
    """How a trainer begins."""

    in_place: bool = False
    """Whether tensors are changed where they are, as vLLM's sparse backend does: then the model
    computes between two chunks. Without, vLLM takes a layer's tensors away until it has all new
    ones, as with its dense backends."""


@dataclass
class Chunk(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some tensors of a checkpoint."""

    folder: str
    names: list[str]


class FolderTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads tensors from the files of a folder."""

    init_info_cls = Start
    update_info_cls = Chunk
    in_place = False

    def init_transfer_engine(self, init_info: Start) -> None:
        """Nothing has to be connected."""
        self.in_place = init_info.in_place

    def start_weight_update(self) -> None:
        """Takes the tensors away, unless they are changed in place."""
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads a chunk. vLLM's own method waits for an accelerator then, which is not here."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Chunk) -> None:
        """Loads the chunk's tensors, as a checkpoint's are loaded."""
        wanted, weights = set(update_info.names), []
        for path in sorted(Path(update_info.folder).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                weights += [(name, file.get_tensor(name)) for name in wanted & set(file.keys())]
        if len(weights) != len(wanted):
            raise ValueError(
                f"not in {update_info.folder}: {wanted - {name for name, _ in weights}}"
            )
        self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        """Gives back what was taken away."""
        if not self.in_place:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing was connected."""


class Worker:
    """Methods that are added to vLLM's workers."""

    def look(self) -> int:
        """Counts the tensors, and changes nothing."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return len(list(model.parameters()))

    def set_element(self, name: str, place: list[int], value: float) -> None:
        """Writes one element of one tensor, past all that vLLM offers for it."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        dict(model.named_parameters())[name].data[tuple(place)] = value

    def negate_when(self, name: str, flag: str) -> None:
        """Has a thread negate a tensor once the file `flag` is there. It says so by another one."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        tensor = dict(model.named_parameters())[name]

        def negate() -> None:
            eventually(Path(flag).exists)
            tensor.data.neg_()
            Path(flag).with_suffix(".done").touch()

        threading.Thread(target=negate, daemon=True).start()

    def fall_asleep(self) -> None:
        """Tells the connector what vLLM tells before sleep mode takes the KV cache's memory. To
        take it needs a GPU."""
        get_kv_transfer_group().unregister_kv_caches()

    def rise(self) -> None:
        """Tells the connector that the memory is there again."""
        get_kv_transfer_group().restore_kv_caches()


WeightTransferEngineFactory.register_engine(BACKEND, FolderTransfer)

# With oneDNN, vLLM packs the weights of linear layers into forms that only its kernels see, and
# empties the tensors. On a GPU the tensors are what computes: so it is here then.
_custom_ops._supports_onednn = False
