"""The `zerojax` command, also as `python -m zerojax`; without its packages, one line says so."""

import os
import sys

from zerojax._extras import MissingExtra, extra


def main() -> int:
    """Run the command line and return its exit status."""
    os.environ["MPLBACKEND"] = "agg"  # plots are files, whatever the environment draws with
    if os.environ.get("COLUMNS") == "0":  # not known: rich would print lines of no width
        del os.environ["COLUMNS"]
    try:
        with extra("cli", "the zerojax command"):
            from zerojax import cli
    except MissingExtra as missing:
        sys.stderr.write(f"zerojax: {missing}\n")
        return 2
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
