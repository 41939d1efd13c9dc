"""Benchmarks of zeroshard against torch's and DeepSpeed's data parallelism; see `docs/benchmarks.md`."""
