"""`python -m anywidth`, and so `torchrun -m anywidth`."""

from anywidth.app.cli import main

if __name__ == "__main__":
    main()
