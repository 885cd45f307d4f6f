"""A client's side of Flower, as far as it can be tested without a server; needs the extra `flower`."""

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs the extra `flower`")


def test_a_message_is_given_up_if_its_server_was_killed_while_it_was_received(tmp_path):
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    from fedmoe_pl.deployment.flower_client import pulling

    log = tmp_path / "supernode.log"
    log.write_text("INFO : Run ID 7 is not in `RUNNING` status. Ignoring message 01c2.")
    missing = SimpleNamespace(object_found=True, object_available=False)
    whole = SimpleNamespace(object_found=True, object_available=True)
    request = SimpleNamespace(run_id=7, object_id="a")
    with pytest.raises(ObjectPullError):
        pulling(lambda _: missing, log)(request)
    assert pulling(lambda _: whole, log)(request) is whole
    request.run_id = 8  # of the server that goes on, from which the rest is still on its way
    assert pulling(lambda _: missing, log)(request) is missing
