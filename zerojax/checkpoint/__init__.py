"""Model states on disk: saved whole or not at all, restored to the bit on any mesh."""

from zerojax.checkpoint._files import DamagedCheckpointError
from zerojax.checkpoint._folder import Checkpoints, Restored, find_checkpoints
from zerojax.checkpoint._leaves import KINDS, SavedLeaf, check_placement, logical_shapes
from zerojax.checkpoint._manifest import Manifest, parts, read_manifest, verify
from zerojax.checkpoint._restore import restore
from zerojax.checkpoint._safetensors import export_safetensors, import_safetensors, is_safetensors
from zerojax.checkpoint._save import PendingSave, save, start_save
from zerojax.checkpoint._verdict import IncompatibleCheckpointError

__all__ = [
    "KINDS",
    "Checkpoints",
    "DamagedCheckpointError",
    "IncompatibleCheckpointError",
    "Manifest",
    "PendingSave",
    "Restored",
    "SavedLeaf",
    "check_placement",
    "export_safetensors",
    "find_checkpoints",
    "import_safetensors",
    "is_safetensors",
    "logical_shapes",
    "parts",
    "read_manifest",
    "restore",
    "save",
    "start_save",
    "verify",
]
