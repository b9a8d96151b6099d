"""Looking at a running scheduler: step records, and what is made of them.

Data flows one way: the event loop and the lane stamp a step (`recorder`), a ring keeps it (`record`), and
metrics, trace, signs, reports and `/server_info` read the ring. Nothing here imports torch or SGLang.
"""
