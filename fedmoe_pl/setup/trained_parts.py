"""What phases train, as far as their declarations tell, and what must not be evaluated or shared without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.backends import changes_loss
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import FixedGate, MixtureOfExperts
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import chain_of_starts
from fedmoe_pl.rounds.run import Run


def trained_names(phase: Phase, module: LightningModule, max_epochs: int) -> set[str]:
    """The parameters that a phase trains: by a mixture's own loss, those of the experts that are weighed.

    Refuses a phase whose epochs and rounds are too few to train any of the shared parameters.
    """
    algorithm = phase.algorithm
    epochs, shows_all = epochs_to_try(algorithm, range(phase.rounds), max(max_epochs, 1))
    if not shows_all and not phase.ckpt_path:
        rank_zero_warn(
            f"{phase}: rounds is {phase.rounds} and max_epochs is {max_epochs}, too many to know what "
            f"{type(algorithm).__name__} never trains; such parts are in train mode and computed in every step."
        )
    pairs, names = [*epochs], [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    trained = {name for name in names if not shows_all or any(algorithm.is_trainable(name, *pair) for pair in pairs)}
    shared = {name for name, _ in module.named_parameters() if algorithm.is_shared(name)}
    if shared and trained and not trained & shared and max_epochs and not phase.ckpt_path:
        because = f"{type(algorithm).__name__} trains none of the shared parameters, such as '{min(shared)}'"
        raise InvalidArgumentError(str(phase), "max_epochs", max_epochs, "higher, or other parameters shared", because)
    if "fresh_optimizers" in algorithm.needs:  # it trains shared ones under other names
        return trained | (shared & {*names})
    idle = [] if changes_loss(algorithm) else [f"{part}." for part in _parts(module) if part not in _weighed(module)]
    return {name for name in trained if not name.startswith(tuple(idle))}


def check_gate(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Refuses a gate that weighs an expert which neither the phase nor one that it starts from has trained.

    Of an expert whose parameters are all frozen, it warns: the user may have trained it.
    """

    def is_trained(part: str) -> bool:
        chain = chain_of_starts(run.phases, run.starts, phase.name, part.split(".")[0])
        names = (name for other in chain for name in trained[other.name])
        return any(other.ckpt_path for other in chain) or any(name.startswith(f"{part}.") for name in names)

    for part in _weighed(module) if phase.evaluate and not phase.algorithm.has_predictor else []:
        parameters = [*module.get_submodule(part).parameters()]
        if not parameters or is_trained(part):
            continue
        gate: Any = module.gate
        if any(parameter.requires_grad for parameter in parameters):
            others = ", ".join(filter(is_trained, _parts(module))) or "there is none"
            allowed = f"one that weighs trained experts only ({others})"
            because = f"no phase trains {part}; if it is pretrained, freeze its parameters"
            raise InvalidArgumentError(str(phase), "gate", gate, allowed, because)
        rank_zero_warn(
            f"{phase}: gate is {type(gate).__name__}, which weighs the module's {part}, but no phase trains it, "
            "because its parameters are frozen; is it pretrained?"
        )


def warn_of_lost(run: Run, trained: dict[str, set[str]], phase: Phase, module: LightningModule) -> None:
    """Warns of a shared parameter that each client has trained for itself before: the server begins anew."""
    for name in (name for name, _ in module.named_parameters() if phase.algorithm.is_shared(name)):
        for other in chain_of_starts(run.phases, run.starts, phase.name, name.split(".")[0])[1:]:
            if other.algorithm.is_shared(name):
                break
            if name in trained[other.name]:
                rank_zero_warn(
                    f"{phase}: {type(phase.algorithm).__name__} shares '{name}', which the clients of "
                    f"'{other.name}' have each trained for themselves; the server begins with the initial one."
                )
                return


def _parts(module: LightningModule) -> Sequence[str]:
    """The parts of a mixture that its gate weighs, in order; none of other modules."""
    return module.weighed_parts if isinstance(module, MixtureOfExperts) else []


def _weighed(module: LightningModule) -> list[str]:
    """Those of them to which the gate gives a weight."""
    parts, gate = _parts(module), getattr(module, "gate", None)
    return [part for index, part in enumerate(parts) if not isinstance(gate, FixedGate) or index in gate.active]
