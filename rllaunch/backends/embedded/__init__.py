"""The embedded backend: a `transformers` model in torch, as trainer and as sampling engine, on the CPU or one GPU.

Its memory is real: every region of the handoff is one flat buffer, booked to the byte in a pool.
"""
