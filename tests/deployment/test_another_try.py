"""A round that is tried again waits for the clients that are away."""

from types import SimpleNamespace

import pytest
from helpers import blobs
from helpers.deployed import Deployment, method_of
from helpers.methods import SIZES

from fedmoe_pl.deployment import plan
from fedmoe_pl.phases.client_failures import ClientError

METHOD = method_of("SecureAggregation", clients_per_round=1.0, rounds=1, evaluate=False)


class Restarting(Deployment):
    """A client is killed before its first training, and is back when somebody has waited; its waits take no time."""

    def __init__(self, folder, waits, monkeypatch):
        super().__init__(METHOD, folder, datamodule=blobs(SIZES[:3]))
        self.killed, self.waits, self.slept = {}, waits, []
        clock = SimpleNamespace(sleep=self.slept.append, monotonic=lambda: sum(self.slept))
        monkeypatch.setattr(plan, "time", clock)

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
    deployed = Restarting(tmp_path, waits, monkeypatch)
    with pytest.warns(UserWarning) as warned:
        (state,) = deployed.run().run.states.values()
    tried_again = "2 of 3 clients answered, but secure aggregation needs 3; the round is tried again"
    assert [tried_again in str(each.message) for each in warned] == [False, True]
    assert state.round == 1 and state.failed and len(deployed.slept) == waits


def test_a_round_is_tried_again_after_a_minute_without_the_clients_that_stay_away(tmp_path, monkeypatch):
    deployed = Restarting(tmp_path, 10**9, monkeypatch)
    with pytest.warns(UserWarning), pytest.raises(ClientError, match="also after 3 more tries"):
        deployed.run()
    assert sum(deployed.slept) == 3 * 60
