# The server, its command line, the console, and consumers (`tmc consume`): one image.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev libmariadb-dev pkg-config
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY tmc_common tmc_common
COPY tmc_client tmc_client
COPY tmc_server tmc_server
COPY tmc_cli tmc_cli
COPY tmc_console tmc_console
RUN python -m venv /opt/tmc && /opt/tmc/bin/pip install --no-cache-dir ".[server,console,http,oidc,mysql,postgresql,rabbitmq,consul]"

FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends libmariadb3 && rm -rf /var/lib/apt/lists/* \
    && useradd --system --create-home tmc
COPY --from=build /opt/tmc /opt/tmc
ENV PATH=/opt/tmc/bin:$PATH TMC_LOG__FORMAT=json
USER tmc
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=4s --start-period=20s CMD ["tmc", "health", "127.0.0.1:50051"]
ENTRYPOINT ["tmc"]
CMD ["serve"]
