"""The examples run, and what their pages say of them holds."""
