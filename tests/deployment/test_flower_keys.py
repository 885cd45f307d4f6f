"""Certificates and keys: what is made, what is refused, and that a key is one client and nobody else."""

import shutil
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

pytest.importorskip("flwr", reason="needs the extra `flower`")

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.provisioning import provision as command
from fedmoe_pl.deployment import Message, flower_keys
from fedmoe_pl.deployment import transport as transports
from fedmoe_pl.deployment.connection import Security, check_certificate, free_port
from fedmoe_pl.deployment.flower_keys import public_keys
from fedmoe_pl.deployment.flower_processes import superlink


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def keys(tmp_path):
    command(["--clients", "2", "--folder", str(tmp_path / "keys"), "--names", "hospitals.example", "10.1.2.3"])
    return tmp_path / "keys"


def server_files(keys):
    return [keys / "server" / name for name in ("ca.pem", "server.pem", "server.key")]


def test_each_part_is_in_a_folder_of_its_own_which_only_this_user_reads(keys):
    of_client = [f"client_{i}/{name}" for i in range(2) for name in ("ca.pem", f"client_{i}", f"client_{i}.pub")]
    of_server = [f"server/{name}" for name in ("ca.pem", "server.pem", "server.key", "num_clients")]
    of_server += [f"server/clients/client_{i}.pub" for i in range(2)]
    assert {*contents(keys)} == {*of_client, *of_server, "authority/ca.key", "authority/ca.pem"}
    assert {path.stat().st_mode & 0o777 for path in keys.rglob("*") if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (keys, *keys.rglob("*")) if path.is_dir()} == {0o700}


def test_what_is_there_is_kept_and_a_client_can_make_its_own_private_key(keys, tmp_path):
    before = contents(keys)
    command(["--client", "2", "--folder", str(tmp_path / "of client 2")])
    public = (tmp_path / "of client 2/client_2.pub").read_bytes()
    (keys / "server/clients/client_2.pub").write_bytes(public)
    command(["--clients", "4", "--folder", str(keys)])
    after = contents(keys)
    assert before.pop("server/num_clients") == b"2"
    assert {name: after[name] for name in before} == before and after["server/clients/client_2.pub"] == public
    new = {"server/clients/client_2.pub", *(f"client_3/{name}" for name in ("ca.pem", "client_3", "client_3.pub"))}
    new |= {"client_2/ca.pem", "server/clients/client_3.pub", "server/num_clients"}
    assert {*after} - {*before} == new
    assert [*public_keys(keys / "server/clients", 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_client_whose_public_key_was_removed_stays_excluded_until_it_is_put_back(has_folder, keys, capsys):
    public = keys / "server/clients/client_1.pub"
    content = public.read_bytes()
    public.unlink()
    if not has_folder:
        shutil.rmtree(keys / "client_1")
    (keys / "server/server.pem").unlink()  # the certificate is renewed, and a client added
    command(["--clients", "3", "--folder", str(keys)])
    assert [*public_keys(keys / "server/clients", 3)] == [0, 2]
    said = capsys.readouterr().out
    assert f"Client 1 stays excluded, because '{public}' was removed; put its public key there" in said
    public.write_bytes(content)
    command(["--clients", "3", "--folder", str(keys)])
    assert public.read_bytes() == content and "excluded" not in capsys.readouterr().out


@pytest.mark.parametrize("host", ["hospitals.example", "10.1.2.3", "localhost", "127.0.0.1", "0.0.0.0"])
def test_the_certificate_is_valid_where_the_server_is_reached(keys, host):
    check_certificate(*server_files(keys), f"{host}:8000")


def test_a_server_says_at_once_what_is_wrong_with_its_certificate(keys, tmp_path, monkeypatch):
    ca, certificate, key = server_files(keys)
    with pytest.raises(MisconfigurationException, match=r"for other\.example as well, where .* not valid for 'other\."):
        check_certificate(ca, certificate, key, "other.example:8000")
    with pytest.raises(MisconfigurationException, match="key values mismatch"):
        check_certificate(ca, certificate, keys / "authority/ca.key", "localhost:8000")
    command(["--clients", "1", "--folder", str(tmp_path / "others")])
    with pytest.raises(MisconfigurationException, match="unable to get local issuer certificate"):
        check_certificate(tmp_path / "others/server/ca.pem", certificate, key, "localhost:8000")

    class LongAgo(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(timezone.utc) - timedelta(days=30)

    monkeypatch.setattr(flower_keys, "datetime", LongAgo)
    certificate.unlink()
    command(["--clients", "2", "--folder", str(keys), "--days", "10"])
    with pytest.raises(MisconfigurationException, match=r"^serve: .* \(certificate has expired\)\.$"):
        check_certificate(ca, certificate, key, "localhost:8000")


def test_keys_that_do_not_say_whose_they_are_are_refused(keys, tmp_path):
    folder = keys / "server/clients"
    for name in ("hospital.pub", "client_2.pub", "client_01.pub"):
        (folder / "client_1.pub").rename(folder / name)
        with pytest.raises(MisconfigurationException, match=f"{name}' is none of the keys of 2 clients"):
            public_keys(folder, 2)
        (folder / name).rename(folder / "client_1.pub")
    (folder / "client_1.pub").write_bytes((folder / "client_0.pub").read_bytes())
    with pytest.raises(MisconfigurationException, match=r"client_1\.pub' is the key of client 0;"):
        public_keys(folder, 2)
    (folder / "client_1.pub").write_text("ssh-rsa nothing")
    with pytest.raises(MisconfigurationException, match="must be a public key of the type ecdsa in OpenSSH format"):
        public_keys(folder, 2)


@pytest.mark.parametrize(
    ("own", "of_whom", "missing"),
    [("server", Security.of_server, "server.key"), ("client_1", partial(Security.of_client, client=1), "client_1")],
)
def test_where_others_can_connect_keys_are_needed(keys, own, of_whom, missing):
    with pytest.raises(InvalidArgumentError, match=r"keys is None.*--insecure true") as error:
        of_whom("10.1.2.3:8000", None, False)
    assert error.value.argument == "keys"
    assert of_whom("10.1.2.3:8000", None, True) == of_whom("127.0.0.1:8000", None, False) == Security()
    found = of_whom("10.1.2.3:8000", str(keys / own), False)
    assert found.ca == keys / own / "ca.pem" and found.key == keys / own / missing
    (keys / own / missing).unlink()
    with pytest.raises(InvalidArgumentError, match=f"{missing} is missing"):
        of_whom("10.1.2.3:8000", str(keys / own), False)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--clients", "0"], "clients is 0, but must be an integer from 1"),
        (["--clients", "1", "--days", "0"], "days is 0, but must be an integer from 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, reason):
    with pytest.raises(MisconfigurationException, match=f"provision: {reason}"):
        command(arguments)


ANSWERING = """
import sys
from pathlib import Path
from fedmoe_pl.deployment import Message, flower_processes
from fedmoe_pl.deployment.connection import Security

def answer(message):
    print("heard", message.kind, message.values.get("text", ""), flush=True)
    values = {"client": int(client), "sizes": [1, 1, 1], "global_test": 0, "shape": [], "dtype": "float32"}
    values |= {"target_shape": [], "target_dtype": "int64", "num_classes": 2, "configuration": {}, "torch": key}
    values["class_numbers"] = {}
    return Message("description", values)

folder, address, key, client = sys.argv[1:]
flower_processes._REFUSED_FOR = 0
own = Path(folder) / "keys" / key
flower_processes.answer_messages(answer, Path(folder) / "of" / key, address, Security(ca=own / "ca.pem", key=own / key))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower uses
def test_a_key_is_one_client_and_a_key_that_was_removed_is_nobody(keys, tmp_path, monkeypatch, request):
    monkeypatch.setattr(transports, "_NOTED_WITHIN", 300.0)  # a machine may be busy
    address, security, logs = f"127.0.0.1:{free_port()}", Security(*server_files(keys), keys / "server/clients"), {}
    (tmp_path / "flower").mkdir()

    def join(key, client):
        (tmp_path / "of" / key).mkdir(parents=True)
        logs[key] = tmp_path / f"{key}.log"
        command = [sys.executable, "-c", ANSWERING, str(tmp_path), address, key, str(client)]
        with logs[key].open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)  # before the wait, if the test fails
        return process

    def serving():
        return superlink(tmp_path / "flower", address, security, 2)

    def ask_until(condition):
        end = time.monotonic() + 600
        while not condition():
            assert time.monotonic() < end
            transport.ask({}, None)
            time.sleep(0.5)

    with serving() as transport:
        liar = join("client_1", 0)
        with pytest.warns(UserWarning, match="left out: it says that it is client 0, with client 1's key"):
            ask_until(lambda: "heard note this key is client 1's, but --client is 0" in logs["client_1"].read_text())
        honest = join("client_0", 0)
        ask_until(lambda: 0 in transport.nodes)
        assert transport.ask({0: Message("describe")}, None)[0].values["torch"] == "client_0"
        transport.ask({0: Message("end")}, None)
    assert honest.wait(timeout=120) == 0
    (keys / "server/clients/client_1.pub").unlink()
    with serving():
        assert liar.wait(timeout=300) != 0
    assert "the server knows no key" in logs["client_1"].read_text()
