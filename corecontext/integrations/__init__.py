"""Plug-ins for other libraries; nothing here is imported by `import corecontext`."""
