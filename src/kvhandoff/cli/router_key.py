"""`kvhandoff router-key`: a new API key, and what the file of tenants says of it."""

from __future__ import annotations

import sys

import typer


def router_key(
    name: str = typer.Argument(help="The tenant: letters, digits, '.', '_' and '-'."),
    operator: bool = typer.Option(False, help="The tenant is an operator: it may do and see everything."),
) -> None:
    """Make an API key. Standard output has the lines for the file of --tenants; the key itself is shown once,
    on standard error, and stands nowhere else."""
    from kvhandoff.router.tenants import check_name, hash_of, new_key, new_salt

    check_name(name)
    key = new_key()
    role = "    role: operator\n" if operator else ""
    sys.stdout.write(f'  - name: "{name}"\n{role}    keys: ["{hash_of(key)}"]\n    salt: "{new_salt()}"\n')
    sys.stdout.flush()
    sys.stderr.write(
        f"\nThe key of {name}, shown only here: {key}\n"
        "The lines above go under `tenants:` of the file. To give a tenant that is there already one more "
        "key, add the hash to its keys, and leave its salt as it is.\n"
    )
