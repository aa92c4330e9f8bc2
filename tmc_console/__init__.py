"""The web console for operators: a process of its own that speaks only the center's admin service.

application.py   the Starlette application: routes, middleware, errors
center.py        the admin service as pages call it
sessions.py      who is logged in; tokens stay here, browsers get a random cookie
guards.py        what every response and every change has to have
view.py          what a page needs: session, center, templates, words
words.py         English and Chinese; times and numbers
pages/           one module per group of pages
"""
