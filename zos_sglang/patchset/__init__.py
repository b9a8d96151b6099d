"""The source patches (`patches/`): parse, apply, check, revert, make and compare them.

Driven by the files of a patch folder alone: a new patch or a new release needs no change here. Imports
neither torch nor SGLang: what it works on may be any release, installed or not.
"""
