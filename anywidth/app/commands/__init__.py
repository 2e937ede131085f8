"""The subcommands of `anywidth`, one file each."""
