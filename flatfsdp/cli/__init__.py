"""The command line `python -m flatfsdp`: one file per command, and the parts they share."""
