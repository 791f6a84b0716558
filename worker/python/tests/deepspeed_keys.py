"""Prints the keys that DeepSpeed's configuration has: by section those of its models with their defaults, and those that it asks for at the top.

A program of test_deepspeed_itself.py. No model says in which section it is: that is written here.
"""

import json
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import DeepSpeedConfig, HybridEngineConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

MODELS = {
    "bf16": DeepSpeedBF16Config,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "csv_monitor": CSVConfig,
    "fp16": DeepSpeedFP16Config,
    "hybrid_engine": HybridEngineConfig,
    "tensor_parallel": TPTrainingConfig,
    "tensorboard": TensorBoardConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "wandb": WandbConfig,
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.leaf_module": DeepSpeedZeroLeafModuleConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "zero_optimization.zenflow": ZenFlowConfig,
}


class Asked(dict[str, Any]):
    """A configuration that notes what it is asked for. Its copies note it at the same place."""

    names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)


def fields(model: Any) -> dict[str, Any]:
    """The model's fields by all their names, with their defaults."""
    found = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        for known in {name, field.alias or name}:
            found[known] = default if isinstance(default, (bool, int, float, str, list)) else None
    return found


def main() -> None:
    DeepSpeedConfig(Asked(train_batch_size=1))
    sections = {section: fields(model) for section, model in MODELS.items()}
    print("keys", json.dumps({"asked": sorted(Asked.names), "sections": sections}))


main()
