"""What a run did and what a plan says, shown.

`profile.py` is where the time of steps went, `page.py` the report page, `pictures.py` its pictures for papers. Read
`page.py` and `schema.py` first.
"""

__all__: list[str] = []
