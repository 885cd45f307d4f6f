"""What a phase starts from."""

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import (
    ClusterMixture,
    FedAvg,
    FineTunedCluster,
    Local,
    PersonalizedExpert,
    PFLMoE,
    SpecialistMixture,
)
from fedmoe_pl.models import LinearGate
from fedmoe_pl.phases.starts import chain_of_starts, find_starts

FEDERATED = Phase("F", FedAvg("global_expert.*"))
QUARTER = Phase("quarter", PersonalizedExpert(gate_fraction=0.25))
ALL = Phase("all", PersonalizedExpert())
LACKING = {
    "start is 'F', but must be a phase of PersonalizedExpert with gate_fraction 0.25, or": [
        FEDERATED,
        Phase("G", PFLMoE(), gate=LinearGate(6), start="F"),
    ],
    "start is 'F', but must be a phase of PersonalizedExpert with gate_fraction 0, or": [
        FEDERATED,
        Phase("G", SpecialistMixture(), start="F"),
    ],
    "start is 'all', but must be a phase of PersonalizedExpert with gate_fraction 0.25, or": [
        FEDERATED,
        ALL,
        Phase("G", PFLMoE(gate_fraction=0.25), start="all"),
    ],
    "start is 'quarter', but must be a phase of PersonalizedExpert with gate_fraction 0, or": [
        FEDERATED,
        QUARTER,
        Phase("G", SpecialistMixture(), start="quarter"),
    ],
    "start is 'again', but must be a phase of PersonalizedExpert with gate_fraction 0.25, or": [
        FEDERATED,
        QUARTER,
        Phase("again", PersonalizedExpert(), start="quarter"),  # has seen the samples that the first left out
        Phase("G", PFLMoE(), start="again"),
    ],
    "start is 'other', but must be a phase of PersonalizedExpert with gate_fraction 0.25, or": [
        FEDERATED,
        QUARTER,
        Phase("other", PFLMoE(0.5, interleaved=True), start="quarter"),  # trains an expert on another split
        Phase("G", PFLMoE(), start="other"),
    ],
    "start is 'again', but must be a phase of PersonalizedExpert with gate_fraction 0.25, or ": [
        FEDERATED,
        QUARTER,
        Phase("again", Local("local_expert.classifier.*"), start="quarter"),  # on all samples
        Phase("G", PFLMoE(), start="again"),
    ],
    **{
        f"start is 'alone', but must be a federated phase, or{' ' * number}": [
            Phase("alone", Local()),
            FEDERATED,
            Phase("G", algorithm, start="alone"),
        ]
        for number, algorithm in enumerate(
            (PersonalizedExpert(), PFLMoE(interleaved=True), FineTunedCluster(), ClusterMixture())
        )
    },
    "start is 'Local', but must be a phase of PersonalizedExpert with gate_fraction 0.1, or": [
        FEDERATED,
        Phase("Local", Local("local_expert.*"), start="F"),
        Phase("G", PFLMoE(0.1), start="Local"),
    ],
}


@pytest.mark.parametrize("sentence", LACKING)
def test_a_mixture_with_a_local_expert_that_is_untrained_or_has_seen_the_gate_s_samples_is_refused(sentence):
    with pytest.raises(
        MisconfigurationException, match=f"^Phase 'G': {sentence.rstrip()} a phase that goes back to one.$"
    ):
        find_starts(LACKING[sentence])


def test_a_mixture_may_go_back_to_its_personalized_expert_or_start_from_the_user_s_own_model():
    phases = [
        FEDERATED,
        ALL,
        QUARTER,
        Phase("frozen", Local("gate.*"), start="quarter"),
        Phase("gate", PFLMoE(), start="frozen"),
        Phase("again", PFLMoE(), start="gate"),
        Phase("specialists", SpecialistMixture(), start="all"),
        Phase("own", PFLMoE(), start="initial"),
        Phase("interleaved", PFLMoE(interleaved=True), start="F"),
        Phase("default", PFLMoE()),
        Phase("longer", PFLMoE(), start="interleaved"),
    ]
    starts = find_starts(phases)
    assert starts == {
        "F": "initial",
        "all": "F",
        "quarter": "F",
        "frozen": "quarter",
        "gate": "frozen",
        "again": "gate",
        "specialists": "all",
        "own": "initial",
        "interleaved": "F",
        "default": "quarter",
        "longer": "interleaved",
    }
    names = [phase.name for phase in chain_of_starts(phases, starts, "again")]
    assert names == ["again", "gate", "frozen", "quarter", "F"]
    assert [phase.name for phase in chain_of_starts(phases, starts, "own")] == ["own"]
    assert chain_of_starts(phases, starts, "initial") == []
