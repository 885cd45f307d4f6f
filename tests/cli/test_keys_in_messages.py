"""The key of an argument in the message of a class that does not know its place."""

import pytest

from fedmoe_pl.cli.errors import with_key

GATE = {"class_path": "a.LinearGate"}
PHASES = [
    {"name": "Local", "algorithm": {"class_path": "a.Local", "init_args": {"trainable": "x"}}, "rounds": 1},
    {
        "name": "B",
        "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}},
        "rounds": 0,
        "gate": None,
    },
    {"name": "C", "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 0.5}}, "rounds": 0},
    {
        "name": "D",
        "algorithm": {"class_path": "a.PFLMoE", "init_args": {"gate_fraction": 2.0}},
        "rounds": 0,
        "gate": GATE,
    },
]
SMALL = {
    "model": {"class_path": "a.A", "init_args": {"gate": GATE}},
    "data": {"class_path": "a.Digits", "init_args": {"num_clients": None, "mean": [0.5], "pool": True}},
    "trainer": {"gradient_clip_val": 50, "max_epochs": 2, "callbacks": None},
    "federation": {"phases": PHASES, "store": "cloud", "callbacks": None},
    "ckpt_path": "none.ckpt",
}


@pytest.mark.parametrize(
    ("message", "completed"),
    [
        ("Phase 'C': rounds is 0, but", "federation.phases.C.rounds is 0, but"),
        (
            "PFLMoE: gate_fraction is 2.0, but",
            "PFLMoE: federation.phases.D.algorithm.init_args.gate_fraction is 2.0, but",
        ),
        (
            "Phase 'C': PFLMoE: gate_fraction is 0.5, but",
            "PFLMoE: federation.phases.C.algorithm.init_args.gate_fraction is 0.5, but",
        ),
        ("Phase 'D': A: gate is a LinearGate, but", "A: federation.phases.D.gate is a LinearGate, but"),
        ("Phase 'B': A: gate is a LinearGate, but", "Phase 'B': A: model.init_args.gate is a LinearGate, but"),
        ("Phase 'B': gradient_clip_val is 50, but", "Phase 'B': trainer.gradient_clip_val is 50, but"),
        ("Dirichlet: num_clients is not set, but", "Dirichlet: data.init_args.num_clients is not set, but"),
        ("Digits: mean is [0.5], but", "Digits: data.init_args.mean is [0.5], but"),
        ("Digits: pool is true, but", "Digits: data.init_args.pool is true, but"),
        ("pool is true, but", "data.init_args.pool is true, but"),
        ("Federation: store is 'cloud', but", "Federation: federation.store is 'cloud', but"),
        ("Federation: callbacks has a PFLMoE.", "Federation: federation.callbacks has a PFLMoE."),
        (
            "PFLMoE: gate_fraction is 0.5, but",
            "PFLMoE: federation.phases.B.algorithm.init_args.gate_fraction or "
            "federation.phases.C.algorithm.init_args.gate_fraction is 0.5, but",
        ),
        ("algorithm is a Local, but", "federation.phases.Local.algorithm is a Local, but"),
    ],
)
def test_an_argument_is_completed_to_its_key(message, completed):
    assert with_key(message, SMALL) == completed


def test_a_phase_whose_name_is_refused_is_named_by_its_place():
    configuration = {"federation": {"name": "..", "phases": [{"name": "FedAvg"}, {"name": ".."}]}}
    assert with_key("Phase: name is '..', but", configuration) == "Phase: federation.phases[1].name is '..', but"


@pytest.mark.parametrize(
    "message",
    [
        "callbacks is None, but",  # of the trainer or of the federation
        "Dirichlet: alpha is -1.0, but",  # nowhere
        "ckpt_path is 'none.ckpt', but",  # is a key as it is
        "trainer.max_epochs is 2, but",
        "trainer: `devices` selected with `CPUAccelerator` should be an int > 0.",
        "Something else went wrong.",
    ],
)
def test_a_message_whose_key_is_not_certain_stays_as_it_is(message):
    assert with_key(message, SMALL) == message
