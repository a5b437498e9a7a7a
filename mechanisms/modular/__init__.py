"""Modular networks: routers, pools of modules, and what they are trained on."""
