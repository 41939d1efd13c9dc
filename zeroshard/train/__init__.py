"""The main job: train a GPT on text, sharded, on any number of ranks.

Owns what `zeroshard train` does: configuration, data, model, loop, files. Uses the engine as any user would, through
`import zeroshard`. Read `loop.py` first: it is the loop of the README, with its bookkeeping.
Nothing is imported here, so that one part can be used without the extra `zeroshard[cli]` that `config.py` needs.
"""

__all__: list[str] = []
