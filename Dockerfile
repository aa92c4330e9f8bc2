# The server, its command line, the console, and consumers (`tmc consume`): one image.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libmariadb-dev pkg-config
WORKDIR /src
# Versions and hashes are locked by ./scripts/lock.
COPY deploy/requirements.txt ./
RUN python -m venv /opt/tmc && /opt/tmc/bin/pip install --no-cache-dir --require-hashes -r requirements.txt
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md ./
COPY clients/python clients/python
COPY protos protos
COPY tmc_client tmc_client
COPY tmc_cli tmc_cli
COPY tmc_common tmc_common
COPY tmc_console tmc_console
COPY tmc_pipeline tmc_pipeline
COPY tmc_pytest tmc_pytest
COPY tmc_server tmc_server
COPY tmc_storm tmc_storm
# The history, from which the version is read, is not in here: docker build --build-arg VERSION=0.1.0 .
ARG VERSION=0.1.0.dev0
RUN SETUPTOOLS_SCM_PRETEND_VERSION=$VERSION /opt/tmc/bin/pip install --no-cache-dir --no-deps ./clients/python .

FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libmariadb3 && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --create-home tmc
COPY --from=build /opt/tmc /opt/tmc
ENV PATH=/opt/tmc/bin:$PATH TMC_LOG__FORMAT=json
USER 10001
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=4s --start-period=20s CMD ["tmc", "health", "127.0.0.1:50051"]
ENTRYPOINT ["tmc"]
CMD ["serve"]
