"""The storm: everything that the center stands on is killed, stopped, cut off and misused while a shop trades; then the books
are compared.

`services` starts what others wrote, `world` puts a center on it, `shop` trades, `faults` lists what can break, `plan` says what
breaks when, `judging` compares. Nothing here imports the server: it is judged from outside.
"""
