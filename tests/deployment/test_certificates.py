"""Certificates that ``fedmoe provision`` makes; Flower is not needed for them."""

import pytest

pytest.importorskip("cryptography", reason="comes with the extra `flower`")

from fedmoe_pl.deployment.connection import check_certificate
from fedmoe_pl.deployment.flower_keys import provision


def test_a_host_name_may_be_longer_than_a_common_name(tmp_path):
    name = "internal-federation-of-hospitals-1234567890.eu-central-1.elb.amazonaws.com"
    names, _, _ = provision(tmp_path, 1, [name], 365)
    assert len(name) > 64 and name in names
    files = [tmp_path / "server" / each for each in ("ca.pem", "server.pem", "server.key")]
    check_certificate(*files, f"{name}:8000")
