"""``fedmoe provision``: certificates and keys of a federation over a network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from fedmoe_pl.catalogue import parser_of
from fedmoe_pl.checks import MOST_COUNTED, check_at_least
from fedmoe_pl.deployment.connection import module_of_flower
from fedmoe_pl.deployment.serve_and_join import private


def provision_parser() -> ArgumentParser:
    """The parser of ``fedmoe provision``."""
    parser = parser_of("provision")
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--clients", type=int, help="number of clients, for whoever runs the server")
    either.add_argument("--client", type=int, help="number of a client, which makes only its own key")
    parser.add_argument("--folder", default="keys", help="where to write; what is there is kept")
    parser.add_argument("--names", nargs="+", help="host names and addresses of the server (default: localhost)")
    parser.add_argument("--days", type=int, default=365, help="how long the server's certificate is valid")
    return parser


def provision(arguments: Sequence[str]) -> None:
    """Runs ``fedmoe provision`` with the arguments after it."""
    options = provision_parser().parse_args([*arguments])
    folder = Path(options.folder)
    for name, lowest, highest in (("clients", 1, MOST_COUNTED), ("client", 0, MOST_COUNTED), ("days", 1, 3650)):
        check_at_least("provision", name, options[name], lowest, highest)
    keys = module_of_flower("provision", "flower_keys")
    with private(folder):
        if options.client is not None:
            public = keys.provision_client(folder, options.client)
            print(f"Send '{public}' to whoever runs the server, and nothing else; put their ca.pem into '{folder}'.")
            return
        names, until, excluded = keys.provision(folder, options.clients, options.names, options.days)
    print(
        f"The server's certificate is for {', '.join(names)}, until {until:%Y-%m-%d}. The server needs "
        f"'{folder / 'server'}', and every client the folder with its number. Keep 'authority' offline."
    )
    for client in excluded:
        public = folder / f"server/clients/client_{client}.pub"
        print(
            f"Client {client} stays excluded, because '{public}' was removed; put its public key there to readmit it."
        )
