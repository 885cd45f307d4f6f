"""A round that is tried again waits for the clients that are away."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import blobs
from helpers.deployed import Passing, deploy, participants
from helpers.methods import METHODS, SIZES

from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.deployment import plan
from fedmoe_pl.phases.participation import ClientError

OF_TRAINER = {"backend": TrainerBackend()}


def of_all(phase):
    return replace(phase, clients_per_round=1.0, rounds=1, evaluate=False)


METHOD = replace(METHODS["SecureAggregation"], phases=lambda: [*map(of_all, METHODS["SecureAggregation"].phases())])


class Restarting(Passing):
    """A transport in which a client is killed before its first training, and is back when somebody has waited."""

    def __init__(self, participants, waits):
        super().__init__(participants)
        self.killed, self.waits = {}, waits

    def ask(self, messages, seconds):
        if any(message.kind == "train masked" for message in messages.values()) and not self.killed:
            self.killed[1] = self.participants.pop(1)
        return super().ask(messages, seconds)

    def away(self):
        if not self.waits:
            self.participants |= self.killed
        self.waits -= 1
        return [client for client in self.killed if client not in self.participants]


@pytest.mark.parametrize("waits", [0, 3])
@pytest.mark.few(1)
def test_a_round_that_needs_all_clients_waits_for_one_that_was_killed(waits, tmp_path, monkeypatch):
    """Its three further tries followed at once, while Flower refuses a client for a minute whose process was killed."""
    slept = []
    monkeypatch.setattr(plan, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept)))
    of_three = blobs(SIZES[:3])
    transport = Restarting(participants(METHOD, of_three, tmp_path, **OF_TRAINER), waits)
    with pytest.warns(UserWarning) as warned:
        deployed = deploy(METHOD, of_three, tmp_path, transport, **OF_TRAINER)
    tried_again = "2 of 3 clients answered, but secure aggregation needs 3; the round is tried again"
    assert [tried_again in str(each.message) for each in warned] == [False, True]
    (state,) = deployed.run.states.values()
    assert state.round == 1 and state.failed and len(slept) == waits


def test_a_round_is_tried_again_after_a_minute_without_the_clients_that_stay_away(tmp_path, monkeypatch):
    slept = []
    monkeypatch.setattr(plan, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept)))
    of_three = blobs(SIZES[:3])
    transport = Restarting(participants(METHOD, of_three, tmp_path, **OF_TRAINER), 10**9)
    with pytest.warns(UserWarning), pytest.raises(ClientError, match="also after 3 more tries"):
        deploy(METHOD, of_three, tmp_path, transport, **OF_TRAINER)
    assert sum(slept) == 3 * 60
