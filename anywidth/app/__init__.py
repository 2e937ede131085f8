"""The command and everything it runs and shows."""
