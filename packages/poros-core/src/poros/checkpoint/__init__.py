"""Reading pretrained models safely and writing everything Poros saves atomically.

Nothing here reads a pickle or runs code that ships with a model.
"""

from poros.checkpoint.adapter_files import AdapterReport, load_adapter, save_adapter, verify_adapter
from poros.checkpoint.adapter_paths import move_adapter
from poros.checkpoint.atomic import atomic_folder, atomic_write_bytes, atomic_write_json
from poros.checkpoint.config import load_config, transformers_knows, unknown_type_error
from poros.checkpoint.headers import FileHeader, TensorEntry, read_header
from poros.checkpoint.model_folder import resolve_model
from poros.checkpoint.names import MappedSource, check_names
from poros.checkpoint.output_folder import check_free_space, prepare_output_folder
from poros.checkpoint.run_state import (
    RunState,
    checkpoint_folder,
    load_run_state,
    newest_complete,
    prune,
    save_run_state,
)
from poros.checkpoint.source import SafetensorsSource

__all__ = [
    "AdapterReport",
    "FileHeader",
    "MappedSource",
    "RunState",
    "SafetensorsSource",
    "TensorEntry",
    "atomic_folder",
    "atomic_write_bytes",
    "atomic_write_json",
    "check_free_space",
    "check_names",
    "checkpoint_folder",
    "load_adapter",
    "load_config",
    "load_run_state",
    "move_adapter",
    "newest_complete",
    "prepare_output_folder",
    "prune",
    "read_header",
    "resolve_model",
    "save_adapter",
    "save_run_state",
    "transformers_knows",
    "unknown_type_error",
    "verify_adapter",
]
