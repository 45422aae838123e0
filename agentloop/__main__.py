"""`python -m agentloop`, as torchrun starts it on every rank."""

from agentloop.cli.main import main

if __name__ == "__main__":
    main()
