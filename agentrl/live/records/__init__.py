"""What the processes of a live run agree on: its tables of the run file, the documents about its
versions, marks on its sessions, names and tokens of its users."""
