"""Certificates that ``fedmoe provision`` makes; Flower is not needed for them."""

import pytest

pytest.importorskip("cryptography", reason="comes with the extra `flower`")

from cryptography import x509

from fedmoe_pl.deployment.connection import check_certificate
from fedmoe_pl.deployment.flower_keys import provision


def test_a_host_name_may_be_longer_than_a_common_name(tmp_path):
    name = "internal-federation-of-hospitals-1234567890.eu-central-1.elb.amazonaws.com"
    names, _, _ = provision(tmp_path, 1, [name], 365)
    assert len(name) > 64 and name in names
    files = [tmp_path / "server" / each for each in ("ca.pem", "server.pem", "server.key")]
    check_certificate(*files, f"{name}:8000")


def test_only_the_authority_may_sign_certificates(tmp_path):
    provision(tmp_path, 1, ["localhost"], 365)
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    allowed = {}
    for file in ("ca.pem", "server.pem"):
        extensions = x509.load_pem_x509_certificate((tmp_path / "server" / file).read_bytes()).extensions
        usage = extensions.get_extension_for_class(x509.KeyUsage).value
        allowed[file] = {name for name in (*names, "key_cert_sign", "crl_sign") if getattr(usage, name)}
        assert extensions.get_extension_for_class(x509.BasicConstraints).value.ca == (file == "ca.pem")
    assert allowed["server.pem"] == {"digital_signature"}
    assert "key_cert_sign" in allowed["ca.pem"] and not allowed["ca.pem"] & {*names[1:]}
