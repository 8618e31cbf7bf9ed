"""What nobody who serves has to load: benchmarks, the chaos test, and the planner of deployments.

The command line imports these when it runs their commands. They may import every other folder, and none imports them.
"""
