"""Plans that a serving engine can run: which strategies it has, and the flags that launch one."""
