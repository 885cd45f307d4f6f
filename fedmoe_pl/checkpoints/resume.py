"""Reads a run's checkpoint to continue it, after comparing its data, seed and configuration."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from fedmoe_pl.checkpoints.checkpoint import FILE, CheckpointWriter, is_of_run, load_checkpoint, rows_of, versions
from fedmoe_pl.checkpoints.client_state import check_states
from fedmoe_pl.checkpoints.configuration import changes, is_listed
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.phases.phase import Phase

_SAMPLES = 10_000
_AT_ONCE = 256  # samples copied at a time, which may be large
_NAMED = 10  # the most clients or classes that a message names


def keys_of(allow_changes: str | list[str] | None) -> list[str]:
    """The keys of ``allow_changes``: a list, or a string of keys separated by commas."""
    if isinstance(allow_changes, str):
        return [key.strip() for key in allow_changes.split(",") if key.strip()]
    return allow_changes or []


def load_run(path: Path, phases: Sequence[Phase], identity: dict[str, Any]) -> dict[str, Any]:
    """Reads a run's checkpoint in order to continue it, with its ``rows`` and the ``writer`` of its next checkpoints.

    All of its phases must be in ``phases``, and its seed and data must be those in ``identity`` (:func:`identify`).
    """
    rounds = {phase.name: phase.rounds for phase in phases}
    writer = CheckpointWriter(path.with_name(Path(FILE).name))
    content = load_checkpoint(path, writer)
    states: dict[str, PhaseState] = content.get("phases", {})
    key = f"ckpt_path is '{path}'"
    if "phases" not in content or not is_of_run(path):
        raise MisconfigurationException(f"{key}, but must be {FILE} in the folder of the run to resume.")
    if not set(states) <= set(rounds):
        raise MisconfigurationException(
            f"{key}, which holds the phases {[*states]}, but the federation's phases are {[*rounds]}."
        )
    config = path.parent.parent / "config.yaml"
    advice = f"take the configuration of that run, '{config}', or " if config.is_file() else ""
    for name, now in identity.items():
        if content[name] != now:
            raise MisconfigurationException(
                f"{key}, a run with {_difference(name, content[name], now)}; {advice}start a new run without ckpt_path."
            )
    for name, state in states.items():
        if state.round > rounds[name] or (state.finished and not state.stopped and state.round != rounds[name]):
            raise MisconfigurationException(
                f"{key}, where '{name}' has had {state.round} rounds, but rounds is {rounds[name]}; a phase that is "
                f"finished cannot have more or fewer: {advice}let a new phase start from it (start: {name})."
            )
        check_states(state.clients, state.best_clients)
    return {**content, "rows": rows_of(path, content), "writer": writer}


def _difference(name: str, before: Any, now: Any) -> str:
    """How data or seed differ between two runs, in words such as ``other clients (now with hospital_I)``."""
    if name not in ("client_names", "classes", "columns"):
        values = f" ({before}, now {now})" if name in ("seed", "partition", "test_set") else ""
        return f"another {name.replace('_', ' ')}{values}"
    what, before, now = "clients" if name == "client_names" else name, before or [], now or []
    changed = {"now with": sorted({*now} - {*before}), "without": sorted({*before} - {*now})}
    texts = [f"{word} {', '.join(names[:_NAMED])}{', ...' * (len(names) > _NAMED)}" for word, names in changed.items()]
    return f"other {what} ({' and '.join(text for text, names in zip(texts, changed.values(), strict=True) if names)})"


def check_configuration(
    path: Path,
    content: dict[str, Any],
    phases: Sequence[Phase],
    configuration: dict[str, str],
    allowed: Collection[str] | None,
) -> None:
    """Compares a run's configuration with its checkpoint's; refuses changes not in ``allowed``, or warns if None."""
    if content["versions"] != versions():
        rank_zero_info(f"'{path}' was written with {_listed(content['versions'])}; now they are {_listed(versions())}.")
    fixed = {phase.name for phase in phases if "fixed_rounds" in phase.algorithm.needs}
    # of these phases, no round so far depends on the total number
    extensible = {
        name: state.round
        for name, state in content["phases"].items()
        if name not in fixed and not state.finished and not state.stopped
    }
    found = changes(content["configuration"], configuration, [*content["phases"]], extensible)
    if not found:
        return
    differences = "; ".join(str(change) for change in found)
    if allowed is None:
        rank_zero_warn(f"ckpt_path is '{path}', a run with another configuration: {differences}.")
        return
    refused = [change for change in found if not is_listed(change.key, allowed)]
    if refused:
        keys = ",".join(change.key for change in refused)
        raise MisconfigurationException(
            f"ckpt_path is '{path}', a run with another configuration: {'; '.join(str(change) for change in refused)}; "
            f"to go on all the same, give allow_changes '{keys}'."
        )
    rank_zero_info(f"'{path}' is continued with another configuration: {differences}.")
    for state in content["phases"].values():
        state.trained, state.curve = {}, None  # a round is trained with one configuration


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def identify(seed: int, datamodule: FederatedDataModule) -> dict[str, Any]:
    """The seed, partition, test set, names, normalization and vocabulary of a run, by which a run is recognized."""
    normalization = datamodule.normalization and [*datamodule.normalization]  # a list, as read back from JSON
    names = [*datamodule.client_names] if datamodule.client_names.given else None
    read = {"client_names": names, "classes": datamodule.classes, "columns": datamodule.columns}
    read |= {"normalization": normalization, "vocabulary": datamodule.vocabulary}
    return {"seed": seed, **read, **fingerprints(datamodule)}


def fingerprints(datamodule: FederatedDataModule) -> dict[str, str]:
    """Fingerprints of the partition (who trains and validates on which samples) and of the test sets.

    Each contains a checksum of the samples' indices, labels and values. Of many samples, only the values of every n-th
    are read, at least ten thousand; of samples that are read one by one, only a few.
    """
    tested = [datamodule.test_samples, datamodule.global_test]
    held = _checksum(datamodule, datamodule.train_samples, datamodule.validation_samples)
    return {
        "partition": f"{datamodule.num_clients} clients, partition {held:08x}",
        "test_set": f"{len(datamodule.global_test)} samples for all, checksum {_checksum(datamodule, *tested):08x}",
    }


def _checksum(datamodule: FederatedDataModule, *parts: ClientSamples | Tensor) -> int:
    sizes = [part.sizes for part in parts if isinstance(part, ClientSamples)]
    samples = torch.cat([part.indices if isinstance(part, ClientSamples) else part for part in parts])
    checksum = 0
    for tensor in (datamodule.y[samples], samples, *sizes):
        checksum = zlib.crc32(tensor.numpy().data, checksum)
    if datamodule.reader is not None:
        return zlib.crc32(repr(datamodule.reader.checksums(samples)).encode(), checksum)
    for some in samples[:: max(len(samples) // _SAMPLES, 1)].split(_AT_ONCE):
        checksum = zlib.crc32(datamodule.x[some].contiguous().view(torch.uint8).numpy().data, checksum)
    return checksum


def name_of_test_set(datamodule: FederatedDataModule, fingerprint: str) -> str:
    """The line below a table of results on a test set that is not the run's own."""
    given = {name: getattr(datamodule, name, None) for name in ("root", "path", "test_dir")}
    places = ", ".join(f"{name} {value}" for name, value in given.items() if isinstance(value, str | PurePath))
    kind = f"{type(datamodule).__name__}{' with ' * bool(places)}{places}"
    return f"\nThe test set is not the one of the run, but that of {kind} ({fingerprint})."
