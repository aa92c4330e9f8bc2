package shop;

import java.nio.ByteBuffer;
import java.sql.Connection;
import java.sql.PreparedStatement;
import java.sql.ResultSet;
import java.sql.SQLException;
import java.util.ArrayList;
import java.util.List;
import java.util.UUID;
import com.google.protobuf.ByteString;
import tmc.v1.CheckRequest;
import tmc.v1.CheckResponse;
import tmc.v1.PrepareRequest;
import tmc.v1.UnknownReason;
import tmc.v1.Verdict;

/** The ledger of a service, as docs/wire.md describes it: PostgreSQL knows which messages belong to committed transactions. */
final class Ledger {
    /** Gives a connection, which is closed after use: a pool in production. */
    interface Connections {
        Connection open() throws SQLException;
    }

    /** A check was answered with ROLLBACK before this transaction committed, so it cannot any more: run it again. */
    static final class Fenced extends Exception {}

    private static final int COMMITTED = 1;
    private static final int ROLLED_BACK = 2;
    private static final long CLOCKS_APART_MS = 3_600_000; // messages are dated by the center's clock, cleaning by ours
    private static final String TABLES = """
            CREATE TABLE IF NOT EXISTS tmc_ledger (
                message_id VARCHAR(64) NOT NULL, state SMALLINT NOT NULL, topic VARCHAR(128) NOT NULL, message_key VARCHAR(128) NOT NULL,
                attempt_id BYTEA NOT NULL, created_ms BIGINT NOT NULL, settled_ms BIGINT, PRIMARY KEY (message_id));
            CREATE INDEX IF NOT EXISTS tmc_ledger_unsettled ON tmc_ledger (settled_ms, message_id);
            CREATE TABLE IF NOT EXISTS tmc_ledger_info (
                id INTEGER NOT NULL, ledger_id BYTEA NOT NULL, horizon_ms BIGINT DEFAULT '0' NOT NULL, PRIMARY KEY (id));
            """;
    private static final String INSERT = "INSERT INTO tmc_ledger (message_id, state, topic, message_key, attempt_id, created_ms, settled_ms)"
            + " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING";

    private final Connections connections;
    final ByteString id;

    Ledger(Connections connections) throws SQLException {
        this.connections = connections;
        try (Connection connection = connections.open()) {
            connection.createStatement().execute(TABLES);
            run(connection, "INSERT INTO tmc_ledger_info (id, ledger_id) VALUES (1, ?) ON CONFLICT DO NOTHING", randomId());
            ResultSet row = connection.createStatement().executeQuery("SELECT ledger_id FROM tmc_ledger_info");
            row.next();
            id = ByteString.copyFrom(row.getBytes(1));
        }
    }

    static byte[] randomId() {
        UUID random = UUID.randomUUID();
        return ByteBuffer.allocate(16).putLong(random.getMostSignificantBits()).putLong(random.getLeastSignificantBits()).array();
    }

    /** Part of the local transaction of a message. */
    void record(Connection connection, String messageId, PrepareRequest message) throws SQLException, Fenced {
        byte[] attempt = message.getAttemptId().toByteArray();
        long now = System.currentTimeMillis();
        if (run(connection, INSERT, messageId, COMMITTED, message.getTopic(), message.getKey(), attempt, now, null) == 0) {
            throw new Fenced();
        }
    }

    void settle(String messageId) throws SQLException {
        try (Connection connection = connections.open()) {
            run(connection, "UPDATE tmc_ledger SET settled_ms = ? WHERE message_id = ?", System.currentTimeMillis(), messageId);
        }
    }

    /** What was committed and, as far as is known here, not submitted. */
    List<String> unsettled() throws SQLException {
        try (Connection connection = connections.open()) {
            ResultSet rows = connection.createStatement()
                    .executeQuery("SELECT message_id FROM tmc_ledger WHERE settled_ms IS NULL AND state = " + COMMITTED);
            List<String> ids = new ArrayList<>();
            while (rows.next()) {
                ids.add(rows.getString(1));
            }
            return ids;
        }
    }

    /** Answers one question of the center. */
    CheckResponse answer(CheckRequest question) {
        CheckResponse.Builder answer = CheckResponse.newBuilder().setMessageId(question.getMessageId());
        if (!question.getLedgerId().equals(id)) {
            return unknown(answer, UnknownReason.UNKNOWN_REASON_WRONG_LEDGER, "prepared with another ledger");
        }
        try (Connection connection = connections.open()) {
            Integer state = state(connection, question.getMessageId());
            if (state == null) {
                ResultSet row = connection.createStatement().executeQuery("SELECT horizon_ms FROM tmc_ledger_info");
                row.next();
                long horizonMs = row.getLong(1);
                if (horizonMs != 0 && horizonMs > question.getCreatedMs() - CLOCKS_APART_MS) {
                    return unknown(answer, UnknownReason.UNKNOWN_REASON_UNSPECIFIED, "the ledger was cleaned since, so its row may be gone");
                }
                state = fence(connection, question) ? ROLLED_BACK : state(connection, question.getMessageId());
            }
            if (state != null && state == COMMITTED) {
                return answer.setVerdict(Verdict.VERDICT_COMMIT).build();
            }
            if (state != null && state == ROLLED_BACK) {
                return answer.setVerdict(Verdict.VERDICT_ROLLBACK).build();
            }
            return unknown(answer, UnknownReason.UNKNOWN_REASON_NOT_NOW, "the row has the state " + state);
        } catch (SQLException e) {
            return unknown(answer, UnknownReason.UNKNOWN_REASON_NOT_NOW, e.getMessage());
        }
    }

    private static CheckResponse unknown(CheckResponse.Builder answer, UnknownReason reason, String detail) {
        return answer.setVerdict(Verdict.VERDICT_UNKNOWN).setUnknownReason(reason).setDetail(detail).build();
    }

    private static Integer state(Connection connection, String messageId) throws SQLException {
        try (PreparedStatement query = connection.prepareStatement("SELECT state FROM tmc_ledger WHERE message_id = ?")) {
            query.setString(1, messageId);
            ResultSet row = query.executeQuery();
            return row.next() ? row.getInt(1) : null;
        }
    }

    /** After this row, a transaction that is still open cannot commit. Returns false: there is a row already. */
    private static boolean fence(Connection connection, CheckRequest question) throws SQLException {
        connection.setAutoCommit(false);
        try {
            connection.createStatement().execute("SET LOCAL lock_timeout = '100ms'"); // it must not wait for that transaction
            long now = System.currentTimeMillis();
            byte[] attempt = question.getAttemptId().toByteArray();
            int inserted = run(connection, INSERT, question.getMessageId(), ROLLED_BACK, question.getTopic(), question.getKey(), attempt, now, now);
            connection.commit();
            return inserted == 1;
        } catch (SQLException e) {
            connection.rollback();
            throw e;
        } finally {
            connection.setAutoCommit(true);
        }
    }

    private static int run(Connection connection, String statement, Object... values) throws SQLException {
        try (PreparedStatement prepared = connection.prepareStatement(statement)) {
            for (int i = 0; i < values.length; i++) {
                prepared.setObject(i + 1, values[i]);
            }
            return prepared.executeUpdate();
        }
    }
}
