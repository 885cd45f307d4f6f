"""What clients are called, and what their files are called."""

import pytest

from fedmoe_pl.checks import InvalidArgumentError, is_file_name
from fedmoe_pl.data import ClientNames


def test_files_of_different_clients_have_different_names_on_every_file_system():
    names = ClientNames(["a/b", "a\\b", "..", "x" * 300, "Ward", "ward", "tab\tin", "Süd", "client_003", "3"])
    files = [names.file(client) for client in range(len(names))]
    assert len({file.casefold() for file in files}) == len(names)
    assert all(is_file_name(f"{file}.ckpt") for file in files)
    assert names.file(7) == "Süd"


def test_a_client_without_a_name_has_its_number():
    names = ClientNames.numbers(3)
    assert not names.given and names.given_name(1) == "" and names.file(1) == "client_001"
    assert names.text([1]) == "client 1" and ClientNames(["A", "B"]).text([0, 1]) == "clients A, B"


def test_an_empty_name_is_refused_and_names_that_are_nearly_the_same_are_named():
    with pytest.raises(InvalidArgumentError, match="client_names is ' ', but must be a name"):
        ClientNames(["A", " "]).check("Data")
    with pytest.warns(UserWarning, match="are different clients: 'ward' and 'Ward'"):
        ClientNames(["ward", "Ward", "B"]).check("Data")


@pytest.mark.parametrize("given", ["B", 1, "1"])
def test_a_client_is_found_by_its_name_or_number(given):
    assert ClientNames(["A", "B"]).number("Federation", given) == 1


@pytest.mark.parametrize("given", ["C", 2, "-1"])
def test_a_client_that_is_not_there_is_refused(given):
    with pytest.raises(InvalidArgumentError, match="must be one of A, B, or a number from 0 to 1"):
        ClientNames(["A", "B"]).number("Federation", given)
