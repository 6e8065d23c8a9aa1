"""Ranks: processes that work together. How they are started, connected, watched and ended.

pool.py starts processes, gives them commands and watches them; process.py is what runs in each of them. launch.py runs
one function on all ranks, its own or torchrun's. transport.py and links.py carry tensors, wire.py carries values.
"""
