package tmc

import (
	"context"
	"database/sql"
	"fmt"
	"regexp"
	"strings"
)

// Database is a kind of SQL database, over any driver of database/sql.
type Database struct {
	binary, suffix string // the type of 16 bytes, and what follows CREATE TABLE
	insert, unless string // the two ends of an INSERT that changes no row if the key is taken
	numbered       bool   // $1, $2 instead of ?
	// shortly is run before a fence, so that it does not wait for a transaction that is still open.
	shortly      string
	shortlyTakes bool // the message id
}

var (
	// PostgreSQL 14 and newer, with pgx or lib/pq.
	PostgreSQL = Database{
		binary: "BYTEA", insert: "INSERT", unless: " ON CONFLICT DO NOTHING", numbered: true, shortly: "SET LOCAL lock_timeout = '100ms'",
	}
	// MySQL 8 and MariaDB 10.6 and newer.
	MySQL = Database{
		binary: "VARBINARY(16)", suffix: " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", insert: "INSERT IGNORE",
		shortly: "SELECT state FROM tmc_ledger WHERE message_id = ? FOR UPDATE NOWAIT", shortlyTakes: true,
	}
	// SQLite in a file. Give the driver a short busy timeout: a fence that waits is answered "not now".
	SQLite = Database{binary: "BLOB", insert: "INSERT", unless: " ON CONFLICT DO NOTHING"}
)

// sql returns a statement with ? as this database takes it.
func (d Database) sql(statement string) string {
	if !d.numbered {
		return statement
	}
	number := 0
	return placeholder.ReplaceAllStringFunc(statement, func(string) string {
		number++
		return fmt.Sprintf("$%d", number)
	})
}

var placeholder = regexp.MustCompile(`\?`)

// insertUnless returns an INSERT that changes no row if the key is taken.
func (d Database) insertUnless(table, columns string) string {
	marks := strings.TrimSuffix(strings.Repeat("?, ", strings.Count(columns, ",")+1), ", ")
	return d.sql(fmt.Sprintf("%s INTO %s (%s) VALUES (%s)%s", d.insert, table, columns, marks, d.unless))
}

// The tables of docs/wire.md, as all clients have them.
const ledgerTables = `
CREATE TABLE tmc_ledger (
    message_id VARCHAR(64) NOT NULL,
    state SMALLINT NOT NULL,
    topic VARCHAR(128) NOT NULL,
    message_key VARCHAR(128) NOT NULL,
    attempt_id BINARY_16 NOT NULL,
    created_ms BIGINT NOT NULL,
    settled_ms BIGINT,
    PRIMARY KEY (message_id)
);
CREATE INDEX tmc_ledger_unsettled ON tmc_ledger (settled_ms, message_id);
CREATE TABLE tmc_ledger_info (
    id INTEGER NOT NULL,
    ledger_id BINARY_16 NOT NULL,
    horizon_ms BIGINT DEFAULT '0' NOT NULL,
    PRIMARY KEY (id)
);`

const inboxTables = `
CREATE TABLE tmc_inbox (
    subscriber VARCHAR(160) NOT NULL,
    message_id VARCHAR(64) NOT NULL,
    received_ms BIGINT NOT NULL,
    PRIMARY KEY (subscriber, message_id)
);
CREATE TABLE tmc_inbox_order (
    line VARCHAR(32) NOT NULL,
    subscriber VARCHAR(160) NOT NULL,
    topic VARCHAR(128) NOT NULL,
    order_key VARCHAR(128) NOT NULL,
    sequence BIGINT NOT NULL,
    changed_ms BIGINT NOT NULL,
    PRIMARY KEY (line)
);`

// createTables makes the tables that are missing, so it needs no right to do so where they are there.
func (d Database) createTables(ctx context.Context, db *sql.DB, statements string) error {
	statements = strings.ReplaceAll(strings.TrimSpace(statements), "BINARY_16", d.binary)
	table := ""
	for _, statement := range strings.Split(strings.TrimSuffix(statements, ";"), ";\n") {
		if found := tableName.FindStringSubmatch(statement); found != nil {
			table = found[1]
			if isThere(ctx, db, table) {
				table = ""
			}
			statement += d.suffix
		}
		if table == "" {
			continue // with its index
		}
		if _, err := db.ExecContext(ctx, statement); err != nil {
			if isThere(ctx, db, table) { // another process was faster
				table = ""
				continue
			}
			return fmt.Errorf("tmc: %w", err)
		}
	}
	return nil
}

var tableName = regexp.MustCompile(`^CREATE TABLE (\w+)`)

func isThere(ctx context.Context, db *sql.DB, table string) bool {
	rows, err := db.QueryContext(ctx, "SELECT 1 FROM "+table+" WHERE 1 = 0")
	return err == nil && rows.Close() == nil
}
