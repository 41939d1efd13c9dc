"""Reports of runs and plans.

`profile.py` measures the time of steps, `page.py` writes the report page, `pictures.py` draws pictures for papers. Read
`page.py` and `schema.py` first.
"""

__all__: list[str] = []
