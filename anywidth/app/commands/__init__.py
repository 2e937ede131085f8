"""The subcommands of `anywidth`, a file each."""
