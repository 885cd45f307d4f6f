"""The file by which commands on a client's machine know which client of a deployed federation it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.checkpoint import is_of_run
from fedmoe_pl.checkpoints.writing import replacing

_FILE = "client.json"


@dataclass(frozen=True)
class OwnClient:
    """The client whose machine this is.

    Attributes:
        id: its id.
        num_clients: number of clients of the federation.
        num_classes: number of classes in the data of all of them.
    """

    id: int
    num_clients: int
    num_classes: int

    def write(self, folder: Path) -> None:
        """Writes the file into the folder of the client's run."""
        with replacing(folder / _FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, checkpoint: Path) -> OwnClient | None:
        """Reads the file of the run that a checkpoint belongs to; None if it is no client's."""
        path = checkpoint.parent.parent / _FILE
        if not (is_of_run(checkpoint) and path.is_file()):
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise MisconfigurationException(
                f"ckpt_path is '{checkpoint}', a client's, but '{path}' is damaged; it must be as the run wrote it."
            ) from error
