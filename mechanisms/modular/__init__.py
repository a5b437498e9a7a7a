"""Modular networks: routers, pools of modules, and training objectives."""
