"""Steps of ours that fail on demand (`ZOS_FAULT`): names, plan and injector.

`plan` knows the names and reads the setting, `injector` makes a callable fail at a given call,
`zos_sglang.upstream.fault_points` puts it in front of the live callables.
"""
