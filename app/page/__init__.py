"""The page at `GET /`: a chat and the live cache, for browsers.

`files` reads what lies in `static/` (HTML, CSS and JavaScript modules, served as they are), and sends it under strict
headers. Everything that the page shows comes from the same API that other clients use.

On the ingress's event loop. Imports nothing of the project.
"""
