"""`sluice page`: a run's folder, or many, as a page that follows them live.

::

    browser ◄── static/ (page.html, page.css, page.js, views.js, charts.js, lanes.js, samples.js)
       │  ▲
       │  └── server-sent events: what has changed, twice a second ◄── views.py: sizes of the run's files
       ▼
    server.py: who may ask, which run ──► views.py, samples.py: data ◄── ledger, metrics, spans, evaluations, logs

`sluice report` (report.py) writes static/ and that data as one file, without a server.

A process of its own that only reads: nothing of a run waits for it, and a run that is over, was killed, or was copied from
another machine looks the same. Every text of a run goes to the browser as JSON, and into the page as text.
"""
