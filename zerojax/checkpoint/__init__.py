"""Model states on disk: saved whole or not at all, restored to the bit on any mesh."""

from zerojax.checkpoint._files import DamagedCheckpointError as DamagedCheckpointError
from zerojax.checkpoint._folder import Checkpoints, Restored, find_checkpoints
from zerojax.checkpoint._manifest import Manifest, parts, read_manifest, verify
from zerojax.checkpoint._restore import restore
from zerojax.checkpoint._safetensors import export_safetensors as export_safetensors
from zerojax.checkpoint._safetensors import import_safetensors as import_safetensors
from zerojax.checkpoint._safetensors import is_safetensors
from zerojax.checkpoint._save import PendingSave, save, start_save
from zerojax.checkpoint._verdict import IncompatibleCheckpointError as IncompatibleCheckpointError
